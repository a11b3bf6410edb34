"""The Helm chart: what it renders is valid, and fits together."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.deployment import CHART, DEPLOY, helm, load, load_all, paths_of, render
from tests.support.kubernetes import check_object
from trioserve import __version__
from trioserve.config.flags import FLAGS

EVERYTHING = (
    'apiKeys.existingSecret="keys"',
    'args=["--parallel","8"]',
    'env=[{"name":"OMP_NUM_THREADS","value":"4"}]',
    'hubToken.existingSecret="hub"',
    'imagePullSecrets=[{"name":"registry"}]',
    'model="ggml-org/gemma-3-4b-it-GGUF"',
    "modelCache.enabled=true",
    'modelCache.storageClassName="fast"',
    "autoscaling.enabled=true",
    "ingress.enabled=true",
    'ingress.className="nginx"',
    'ingress.hosts=[{"host":"llm.example.org"}]',
    'ingress.tls=[{"hosts":["llm.example.org"],"secretName":"tls"}]',
    "httpRoute.enabled=true",
    'httpRoute.parentRefs=[{"name":"gateway","namespace":"gateways"}]',
    'httpRoute.hostnames=["llm.example.org"]',
    "networkPolicy.enabled=true",
    'networkPolicy.from=[{"namespaceSelector":{}}]',
    "serviceMonitor.enabled=true",
    'serviceMonitor.labels={"release":"prometheus"}',
    'podAnnotations={"a":"b"}',
    'nodeSelector={"gpu":"true"}',
    'tolerations=[{"key":"nvidia.com/gpu","operator":"Exists"}]',
    'resources={"limits":{"nvidia.com/gpu":1}}',
    'priorityClassName="high"',
    'runtimeClassName="nvidia"',
    'topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"kubernetes.io/hostname",'
    '"whenUnsatisfiable":"ScheduleAnyway"}]',
)


def container(objects: dict[str, Any]) -> dict[str, Any]:
    (only,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_helm_finds_nothing_to_complain_about() -> None:
    command = [helm(), "lint", "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "settings",
    [
        (),
        EVERYTHING,
        (*EVERYTHING, 'autoscaling.kind="keda"'),
        ('updateStrategy="Recreate"', "serviceAccount.create=false"),
    ],
    ids=["defaults", "everything", "keda", "recreate"],
)
def test_each_object_is_valid(settings: tuple[str, ...]) -> None:
    objects = render(*settings)
    assert {"Deployment", "Service"} <= objects.keys()
    for one in objects.values():
        check_object(one)


def test_a_value_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="modle"):
        render('modle="x"')
    with pytest.raises(ValueError, match=r"needs ingress\.hosts"):
        render("ingress.enabled=true")
    with pytest.raises(ValueError, match=r"needs metrics\.enabled"):
        render("serviceMonitor.enabled=true", "metrics.enabled=false")


def test_each_value_is_in_the_schema() -> None:
    values = load(CHART / "values.yaml")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert paths_of(values) == [one for one in schema_paths(schema) if one != "global"]


def schema_paths(schema: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in schema["properties"].items():
        if value.get("additionalProperties") is False and "properties" in value:
            found += schema_paths(value, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return sorted(found)


def test_the_versions_are_that_of_the_package() -> None:
    chart = load(CHART / "Chart.yaml")
    assert chart["appVersion"] == __version__
    assert container(render())["image"] == f"trioserve:{__version__}"


def test_flags_of_the_container_are_flags_of_the_command() -> None:
    known = {name for one in FLAGS for name in one.names}
    flags = container(render(*EVERYTHING))["args"]
    assert "--model=ggml-org/gemma-3-4b-it-GGUF" in flags
    assert {flag.partition("=")[0] for flag in flags if flag.startswith("-")} <= known


def test_a_pod_has_time_to_drain() -> None:
    objects = render("drain.timeoutSeconds=120", "drain.preStopSeconds=20")
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert "--drain-timeout=120" in container(objects)["args"]
    assert container(objects)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    assert pod["terminationGracePeriodSeconds"] >= 120 + 20 + 5


def test_variables_of_services_do_not_reach_the_server() -> None:
    """A service named trioserve would set TRIOSERVE_PORT, which is no setting of the server."""
    assert render()["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_pods_meet_the_restricted_pod_security_standard() -> None:
    objects = render(*EVERYTHING)
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    kinds = {kind for volume in pod["volumes"] for kind in volume} - {"name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret"}


def test_selectors_find_the_pods_and_ports_are_those_of_the_container() -> None:
    objects = render(*EVERYTHING)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    (port,) = container(objects)["ports"]
    for selector in (
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        load_all(DEPLOY / "inference-extension" / "inferencepool.yaml")[0]["spec"]["selector"][
            "matchLabels"
        ],
    ):
        assert selector.items() <= labels.items()
    service_labels = objects["Service"]["metadata"]["labels"]
    monitored = objects["ServiceMonitor"]["spec"]
    assert monitored["selector"]["matchLabels"].items() <= service_labels.items()
    assert monitored["endpoints"][0]["port"] == objects["Service"]["spec"]["ports"][0]["name"]
    assert f"--port={port['containerPort']}" in container(objects)["args"]


def test_replicas_are_left_to_the_autoscaler() -> None:
    assert render("replicaCount=3")["Deployment"]["spec"]["replicas"] == 3
    assert "replicas" not in render("autoscaling.enabled=true")["Deployment"]["spec"]


def test_the_adapter_names_the_metrics_that_the_autoscaler_reads() -> None:
    (rule,) = load(DEPLOY / "prometheus-adapter-values.yaml")["rules"]["custom"]
    named = rule["name"]["as"].replace("${1}", "")
    scaler = render("autoscaling.enabled=true")["HorizontalPodAutoscaler"]["spec"]
    for metric in scaler["metrics"]:
        name = metric["pods"]["metric"]["name"].removeprefix(named)
        assert name in {"num_requests_waiting", "num_requests_running"}
        assert name.rpartition("_")[2] in rule["seriesQuery"]
