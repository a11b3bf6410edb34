"""Checks objects of Kubernetes against the schemas of its API, and of custom resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.deployment import load

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is missing: make test-deploy installs it"
)

_SCHEMAS = Path(__file__).parents[1] / "deploy" / "schemas" / "custom_resources.yaml"
_OLDEST, _NEWEST = "1.29", kubernetes_validate.latest_version()


def check_object(one: dict[str, Any]) -> None:
    """Check an object, and pods in it, with fields that are unknown as errors.

    Raises:
        Exception: it is not valid; the message says where.
    """
    custom = load(_SCHEMAS)
    kind = f"{one['apiVersion']}/{one['kind']}"
    if kind not in custom:
        for version in (_OLDEST, _NEWEST):
            kubernetes_validate.validate(one, version, strict=True)
        return
    assert one.keys() == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(one["spec"], {**custom[kind], "$defs": custom["$defs"]})
    cluster = one["spec"].get("rayClusterConfig", {})
    for group in (*cluster.get("workerGroupSpecs", ()), cluster.get("headGroupSpec")):
        if group is not None:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
            check_object({**pod, "spec": group["template"]["spec"]})
