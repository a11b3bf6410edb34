"""The settings that `trioserve launch` makes for each agent."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from trioserve.cli.agents import AGENTS, Endpoint, Settings

ENDPOINT = Endpoint(
    url="http://127.0.0.1:8080", model="qwen3", context=65_536, sees_images=True, api_key="secret"
)
FOLDER = Path("/run/launch")


def settings(name: str, endpoint: Endpoint = ENDPOINT) -> Settings:
    return AGENTS[name].settings(endpoint, FOLDER)


def after(settings: Settings, flag: str) -> str:
    """The value of a flag."""
    return settings.arguments[settings.arguments.index(flag) + 1]


def in_file(settings: Settings, path: str) -> Any:
    """The JSON in a file that an argument or a variable names."""
    assert Path(path).parent == FOLDER
    return json.loads(settings.files[Path(path).name])


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_address_the_model_and_the_key(name: str) -> None:
    made = settings(name)
    text = "\n".join([*made.arguments, *made.environ.values(), *made.files.values()])
    assert ENDPOINT.url in text
    assert ENDPOINT.model in text
    sizes = {ENDPOINT.context, ENDPOINT.context - ENDPOINT.max_answer}
    if name != "hermes":  # which asks the server
        assert any(str(size) in text for size in sizes)
    assert ENDPOINT.api_key in text
    assert not any("secret" in word for word in made.arguments), "other users see arguments"
    assert all(f"{FOLDER}/{file}" in text for file in made.files)


def test_an_answer_leaves_most_of_the_context_to_the_prompt() -> None:
    sizes = [Endpoint(url="", model="", context=n).max_answer for n in (8_192, 1_000_000)]
    assert sizes == [2_048, 32_000]


def test_codex() -> None:
    made = settings("codex")
    assert made.arguments[::2] == ["-c"] * (len(made.arguments) // 2)
    config = tomllib.loads("\n".join(made.arguments[1::2]))
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:8080/v1"
    assert provider["wire_api"] == "responses"
    assert made.environ[provider["env_key"]] == "secret"
    assert (config["model"], config["model_context_window"]) == ("qwen3", 65_536)
    assert config["analytics"] == {"enabled": False}


def test_claude_code() -> None:
    made = settings("claude")
    assert in_file(made, after(made, "--settings")) == {"env": made.environ}
    assert made.environ["ANTHROPIC_BASE_URL"] == ENDPOINT.url
    assert made.environ["ANTHROPIC_AUTH_TOKEN"] == "secret"
    models = {text for name, text in made.environ.items() if name.endswith("_MODEL")}
    assert models == {"qwen3"}
    assert "ANTHROPIC_API_KEY" in AGENTS["claude"].cleared


@pytest.mark.parametrize("sees", [True, False])
def test_opencode(sees: bool) -> None:
    endpoint = Endpoint(url="http://h:1", model="user/repo:Q8_0", context=40_000, sees_images=sees)
    config = json.loads(settings("opencode", endpoint).environ["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    chosen = config["provider"][provider]
    assert chosen["options"]["baseURL"] == "http://h:1/v1"
    assert chosen["options"]["apiKey"] == "{env:TRIOSERVE_API_KEY}"
    described = chosen["models"][model]
    assert described["limit"] == {"context": 40_000, "output": 10_000}
    assert ("image" in described["modalities"]["input"]) is sees


def test_files_of_settings() -> None:
    made = settings("qwen")
    defaults = in_file(made, made.environ["QWEN_CODE_SYSTEM_DEFAULTS_PATH"])
    assert defaults["model"]["generationConfig"]["contextWindowSize"] == 65_536
    made = settings("cline")
    stored = in_file(made, made.environ["CLINE_PROVIDER_SETTINGS_PATH"])["providers"]
    chosen = stored[after(made, "--provider")]["settings"]
    assert (chosen["model"], chosen["contextWindow"]) == ("qwen3", 65_536)
    made = settings("continue")
    [model] = in_file(made, after(made, "--config"))["models"]
    assert (model["model"], model["apiBase"]) == ("qwen3", "http://127.0.0.1:8080/v1")
    assert "image_input" in model["capabilities"]
    made = settings("aider")
    metadata = in_file(made, after(made, "--model-metadata-file"))
    assert metadata[after(made, "--model")]["max_input_tokens"] == 65_536


def test_the_extension_of_pi_has_a_provider() -> None:
    made = settings("pi")
    text = made.files[Path(after(made, "-e")).name]
    name, provider = text.partition("registerProvider(")[2].split(", ", 1)
    described = json.loads(provider.rpartition(");")[0])
    assert after(made, "--provider") == json.loads(name)
    assert made.environ[described["apiKey"]] == "secret"
    [model] = described["models"]
    assert (model["id"], model["contextWindow"]) == ("qwen3", 65_536)
    assert model["input"] == ["text", "image"]


def _told(**model: object) -> str:
    common = {"visibility": "list", "shell_type": "shell", "truncation_policy": {"limit": 1},
              "experimental_supported_tools": []}  # fmt: skip
    return json.dumps({"models": [{**common, "slug": "gpt", "priority": 1, **model}]})


@pytest.mark.parametrize(
    "told",
    [
        _told(base_instructions="Be brief."),
        _told(model_messages={"instructions_template": "Be brief."}),
    ],
)
def test_the_catalogue_of_codex_has_its_own_instructions(told: str) -> None:
    made = settings("codex", attrs.evolve(ENDPOINT, told=told))
    assert f'model_catalog_json="{FOLDER}/models.json"' in made.arguments
    (model,) = json.loads(made.files["models.json"])["models"]
    assert model["slug"] == model["display_name"] == ENDPOINT.model
    assert (model["base_instructions"], model["shell_type"]) == ("Be brief.", "shell")
    assert (model["context_window"], model["priority"]) == (ENDPOINT.context, 1)


@pytest.mark.parametrize(
    "told", ["", "{", "[]", '{"models": []}', _told(), _told(visibility="hide"), _told(priority="")]
)
def test_codex_without_a_catalogue(told: str) -> None:
    made = settings("codex", attrs.evolve(ENDPOINT, told=told))
    assert not made.files
    assert "model_catalog_json" not in " ".join(made.arguments)


def test_codex_searches_where_the_server_does(tmp_path: Path) -> None:
    def words(searches: bool) -> Sequence[str]:
        endpoint = attrs.evolve(ENDPOINT, searches_web=searches)
        return AGENTS["codex"].settings(endpoint, tmp_path).arguments

    assert 'web_search="live"' in words(searches=True)
    assert 'web_search="disabled"' in words(searches=False)
