"""Ray Serve takes the configuration in `examples/deploy/kuberay/rayservice.yaml`, and so do we."""

from __future__ import annotations

import pytest

schema = pytest.importorskip("ray.serve.schema", reason="Ray is missing: trioserve[ray]")

from tests.support.deployment import DEPLOY, load, yaml  # noqa: E402
from trioserve.ray import app  # noqa: E402


def test_the_application_can_be_built() -> None:
    service = load(DEPLOY / "kuberay" / "rayservice.yaml")
    config = schema.ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "trioserve.ray:app"
    assert app(application.args) is not None
