"""compose.yaml: valid, and as safe as the page says."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.deployment import DEPLOY, load
from trioserve.config.flags import FLAGS
from trioserve.config.parse import parse

COMPOSE = DEPLOY / "compose.yaml"
WATCH = DEPLOY / "compose.watch.yaml"


def service(name: str) -> dict[str, Any]:
    return dict(load(COMPOSE)["services"][name])


@pytest.mark.needs("TEST_DEPLOY")
@pytest.mark.parametrize("file", [COMPOSE, WATCH], ids=lambda file: file.name)
def test_it_is_what_the_compose_specification_allows(file: Path) -> None:
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(load(file), json.loads(schema.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["trioserve", "trioserve-gpu"])
def test_a_container_may_do_no_more_than_it_needs(name: str) -> None:
    one = service(name)
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    assert one["tmpfs"] == ["/tmp"]
    (port,) = one["ports"]
    assert port.startswith("${ADDRESS:-127.0.0.1}:"), "by default for this machine only"


def test_only_the_service_for_the_cpu_starts_by_itself() -> None:
    assert "profiles" not in service("trioserve")
    assert service("trioserve-gpu")["profiles"] == ["gpu"]
    assert service("trioserve-gpu")["build"]["dockerfile"] == "examples/deploy/Dockerfile"


def test_the_environment_is_one_that_the_server_takes_as_it_is_without_a_dotenv() -> None:
    given = {
        name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)
        for name, value in service("trioserve")["environment"].items()
    }
    config = parse([], given).config
    assert config.model is None
    assert config.metrics_endpoint is True
    seconds = int(re.fullmatch(r"(\d+)s", service("trioserve")["stop_grace_period"])[1])
    assert seconds > config.drain_timeout
    names = {flag.variable for flag in FLAGS} | {"HF_TOKEN"}
    assert given.keys() <= names


def test_what_watches_it_has_its_files_and_its_address() -> None:
    watch = load(WATCH)
    for one in watch["services"].values():
        for volume in one["volumes"]:
            source = volume.split(":")[0]
            assert source in watch["volumes"] or (DEPLOY / source).exists(), volume
        assert all(port.startswith("${ADDRESS:-127.0.0.1}:") for port in one.get("ports", ()))
    here, example = (
        yaml.safe_load(text)
        for text in (
            watch["configs"]["prometheus"]["content"],
            (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"),
        )
    )
    assert here["global"] == example["global"]
    (job,), (expected,) = here["scrape_configs"], example["scrape_configs"]
    assert job["job_name"] == expected["job_name"]
    assert job["static_configs"] == [{"targets": ["trioserve:8080"]}]
    assert "trioserve" in load(COMPOSE)["services"]
