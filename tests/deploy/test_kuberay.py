"""The RayService: valid, and Ray Serve takes the configuration in it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.deployment import DEPLOY, load, yaml
from tests.support.kubernetes import check_object

SERVICE = DEPLOY / "kuberay" / "rayservice.yaml"


def serve_config() -> dict[str, Any]:
    return dict(yaml.safe_load(load(SERVICE)["spec"]["serveConfigV2"]))


def pods() -> list[dict[str, Any]]:
    cluster = load(SERVICE)["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_it_is_valid() -> None:
    check_object(load(SERVICE))


def test_ray_serve_takes_the_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is missing: trioserve[ray]")
    config = schema.ServeDeploySchema.model_validate(serve_config())
    assert [one.name for one in config.applications] == ["trioserve"]


def test_the_ports_are_those_of_the_containers() -> None:
    (head,) = pods()[0]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports["serve"] == serve_config()["http_options"]["port"]


def test_all_pods_run_the_same_image_as_a_user_without_rights() -> None:
    images = {one["image"] for pod in pods() for one in pod["containers"]}
    assert len(images) == 1
    for pod in pods():
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for one in pod["containers"]:
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_workers_have_room_for_the_replicas() -> None:
    """A replica takes the CPUs that Ray knows of: those of its pod's limit."""
    (application,) = serve_config()["applications"]
    (group,) = load(SERVICE)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    replicas = application["args"]["replicas"] * len(application["args"]["models"])
    assert re.fullmatch(
        r"\d+", group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    )
    assert replicas <= group["replicas"]
