"""The settings that `trioserve launch` makes for each agent."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from trioserve.cli.agents import AGENTS, KEY_VARIABLE, Endpoint, Settings

ENDPOINT = Endpoint(
    url="http://127.0.0.1:8080", model="qwen3", context=65_536, sees_images=True, api_key="secret"
)
FOLDER = Path("/run/launch")


def settings(name: str, endpoint: Endpoint = ENDPOINT) -> Settings:
    return AGENTS[name].settings(endpoint, FOLDER)


def after(settings: Settings, flag: str) -> str:
    """The value of a flag."""
    return settings.arguments[settings.arguments.index(flag) + 1]


def in_file(settings: Settings, flag: str) -> Any:
    """What is in the JSON file that a flag names."""
    path = Path(after(settings, flag))
    assert path.parent == FOLDER
    return json.loads(settings.files[path.name])


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
    assert in_file(made, "--settings") == {"env": made.environ}
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
    assert chosen["options"]["apiKey"] == f"{{env:{KEY_VARIABLE}}}"
    described = chosen["models"][model]
    assert described["limit"] == {"context": 40_000, "output": 10_000}
    assert ("image" in described["modalities"]["input"]) is sees


def test_qwen_code() -> None:
    made = settings("qwen")
    assert after(made, "--model") == made.environ["OPENAI_MODEL"] == "qwen3"
    assert made.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/v1"
    path = Path(made.environ["QWEN_CODE_SYSTEM_DEFAULTS_PATH"])
    defaults = json.loads(made.files[path.name])
    assert defaults["model"]["generationConfig"]["contextWindowSize"] == 65_536
    assert defaults["privacy"] == {"usageStatisticsEnabled": False}


def test_pi() -> None:
    made = settings("pi")
    path = Path(after(made, "-e"))
    name, provider = made.files[path.name].partition("registerProvider(")[2].split(", ", 1)
    described = json.loads(provider.rpartition(");")[0])
    assert after(made, "--provider") == json.loads(name)
    assert described["baseUrl"] == "http://127.0.0.1:8080/v1"
    assert made.environ[described["apiKey"]] == "secret"
    [model] = described["models"]
    assert (model["id"], model["contextWindow"]) == ("qwen3", 65_536)
    assert model["input"] == ["text", "image"]


def test_aider() -> None:
    made = settings("aider")
    model = after(made, "--model")
    assert model == after(made, "--weak-model") == "openai/qwen3"
    assert in_file(made, "--model-metadata-file")[model]["max_input_tokens"] == 65_536
    assert made.environ["AIDER_OPENAI_API_BASE"] == "http://127.0.0.1:8080/v1"


def test_gptme() -> None:
    made = settings("gptme")
    assert after(made, "--model") == "local/qwen3"
    assert made.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/v1"
    assert made.environ["GPTME_CONTEXT_LENGTH"] == "65536"


def test_cline() -> None:
    made = settings("cline")
    path = Path(made.environ["CLINE_PROVIDER_SETTINGS_PATH"])
    stored = json.loads(made.files[path.name])["providers"]
    chosen = stored[after(made, "--provider")]["settings"]
    assert (chosen["model"], chosen["contextWindow"]) == ("qwen3", 65_536)
    assert chosen["baseUrl"] == "http://127.0.0.1:8080/v1"


def test_continue() -> None:
    [model] = in_file(settings("continue"), "--config")["models"]
    assert (model["model"], model["apiBase"]) == ("qwen3", "http://127.0.0.1:8080/v1")
    assert model["defaultCompletionOptions"]["contextLength"] == 65_536
    assert "image_input" in model["capabilities"]


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
