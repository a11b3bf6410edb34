"""The RayService: valid, and its parts fit. `tests/ray` builds the application in it."""

from __future__ import annotations

from typing import Any

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


def test_workers_have_room_for_what_runs_on_them() -> None:
    """Ray counts the CPUs of a pod's limit; an ingress takes one, unless it is told otherwise."""
    (application,) = serve_config()["applications"]
    (group,) = load(SERVICE)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    args = application["args"]
    a_replica = sum(
        model["deployment"]["ray_actor_options"]["num_cpus"] for model in args["models"].values()
    )
    (container,) = group["template"]["spec"]["containers"]
    a_worker = int(container["resources"]["limits"]["cpu"])
    assert args["replicas"] == args["ingresses"] == group["replicas"]
    assert a_replica + 1 <= a_worker
