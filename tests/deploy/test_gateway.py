"""The pool and the endpoint picker of the Gateway API's inference extension."""

from __future__ import annotations

from typing import Any

from tests.support.deployment import DEPLOY, load, load_all, yaml
from tests.support.kubernetes import check_object

FOLDER = DEPLOY / "inference-extension"


def picker() -> dict[str, Any]:
    epp = load(FOLDER / "llm-d-router-values.yaml")["router"]["epp"]
    return dict(yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]]))


def test_the_pool_and_its_route_are_valid_and_fit() -> None:
    pool, route = load_all(FOLDER / "inferencepool.yaml")
    for one in (pool, route):
        check_object(one)
    (rule,) = route["spec"]["rules"]
    (reference,) = rule["backendRefs"]
    assert reference["name"] == pool["metadata"]["name"]
    router = load(FOLDER / "llm-d-router-values.yaml")["router"]
    assert router["modelServers"]["matchLabels"] == pool["spec"]["selector"]["matchLabels"]
    assert router["modelServers"]["targetPorts"] == pool["spec"]["targetPorts"]


def test_the_picker_has_each_plugin_that_its_profile_names() -> None:
    config = picker()
    known = {plugin["type"] for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= known


def test_the_picker_knows_the_engine_that_pods_are_labelled_with() -> None:
    (extractor,) = [one for one in picker()["plugins"] if one["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    template = (DEPLOY / "helm/trioserve/templates/deployment.yaml").read_text(encoding="utf-8")
    assert engine["name"] == extractor["parameters"]["defaultEngine"] == "trioserve"
    assert f"llm-d.ai/engine-type: {engine['name']}\n" in template
