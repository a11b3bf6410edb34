"""The coding agents that ``trioserve launch`` starts, and their settings to use a server.

The settings hold for one run: arguments, environment variables, and files in a temporary folder.
They win over the configuration of the agent, which stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import attrs

#: The variable that has the API key, for agents whose settings name a variable.
KEY_VARIABLE = "TRIOSERVE_API_KEY"

#: The key of a server without keys: agents refuse to start without one.
NO_KEY = "none"

#: The name of the provider, in agents that have several.
PROVIDER = "trioserve"

#: Most tokens of an answer, for agents that must know; they leave as much of the context free.
_MAX_ANSWER = 32_000

#: Milliseconds for an answer to begin: reading a long prompt takes minutes on a CPU.
_PATIENCE = 3_600_000


@attrs.frozen(kw_only=True)
class Endpoint:
    """A model of a server: what an agent is to use.

    `url` ends before ``/v1``. `context` is the number of tokens that a request may have.
    `is_toy`: it is the bundled model. `told` is what the agent says of itself; see `Agent.asked`.
    """

    url: str
    model: str
    context: int
    sees_images: bool = False
    searches_web: bool = False
    is_toy: bool = False
    api_key: str = NO_KEY
    told: str = ""

    @property
    def max_answer(self) -> int:
        return min(_MAX_ANSWER, self.context // 4)

    @property
    def v1(self) -> str:
        """The URL as clients of OpenAI have it."""
        return f"{self.url}/v1"

    @property
    def inputs(self) -> list[str]:
        return ["text", "image"] if self.sees_images else ["text"]

    def described(self, **more: object) -> dict[str, object]:
        """The model, in the form that several agents have."""
        return {
            "id": self.model,
            "name": self.model,
            "input": self.inputs,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": self.context,
            "maxTokens": self.max_answer,
            **more,
        }


def _texts(files: Mapping[str, object]) -> Mapping[str, str]:
    return {name: it if isinstance(it, str) else json.dumps(it) for name, it in files.items()}


@attrs.frozen
class Settings:
    """Settings to start an agent with. `files` go into the folder of the run, as text or JSON."""

    environ: Mapping[str, str]
    arguments: Sequence[str] = ()
    files: Mapping[str, str] = attrs.field(factory=dict, converter=_texts)


@attrs.frozen
class Agent:
    """A program that edits code with the help of a model.

    Attributes:
        title: its name.
        program: the command that starts it.
        install: the command that installs it.
        settings: makes it use an endpoint; the path is the folder of the run.
        first_prompt: about how many tokens its first request has.
        cleared: variables of the environment that would win over the settings.
        asked: its arguments to print what its settings are made of.
    """

    title: str
    program: str
    install: str
    settings: Callable[[Endpoint, Path], Settings]
    first_prompt: int
    cleared: Sequence[str] = ()
    asked: Sequence[str] = ()


#: Fields of Codex's own models that say nothing of OpenAI's service.
_OF_ANY_MODEL = ("shell_type", "truncation_policy", "experimental_supported_tools")


def _catalogue(endpoint: Endpoint) -> dict[str, object]:
    """Codex's catalogue: the model with the instructions of its plainest one; {} without them."""
    try:
        known = [one for one in json.loads(endpoint.told)["models"] if one["visibility"] == "list"]
        plainest = max(known, key=lambda one: one["priority"])
        texts = plainest.get("model_messages") or {}
        instructions = plainest.get("base_instructions") or texts["instructions_template"]
        kept = {name: plainest[name] for name in _OF_ANY_MODEL}
    except (KeyError, TypeError, ValueError):
        return {}
    model = {
        **kept,
        "slug": endpoint.model,
        "display_name": endpoint.model,
        "description": "A model of trioserve.",
        "supported_reasoning_levels": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "base_instructions": instructions,
        "support_verbosity": False,
        "supports_parallel_tool_calls": True,
        "context_window": endpoint.context,
        "input_modalities": endpoint.inputs,
    }
    return {"models": [model]}


def _codex(endpoint: Endpoint, folder: Path) -> Settings:
    provider = f"model_providers.{PROVIDER}"
    overrides: dict[str, str | int | bool] = {
        "model_provider": PROVIDER,
        f"{provider}.name": PROVIDER,
        f"{provider}.base_url": endpoint.v1,
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": KEY_VARIABLE,
        f"{provider}.stream_idle_timeout_ms": _PATIENCE,
        "model": endpoint.model,
        "model_context_window": endpoint.context,
        "web_search": "live" if endpoint.searches_web else "disabled",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
    }
    files = {}
    if catalogue := _catalogue(endpoint):
        files["models.json"] = catalogue
        overrides["model_catalog_json"] = str(folder / "models.json")
    # A value is TOML, whose strings, numbers and booleans are those of JSON.
    pairs = (("-c", f"{name}={json.dumps(value)}") for name, value in overrides.items())
    return Settings({KEY_VARIABLE: endpoint.api_key}, [*chain(*pairs)], files)


def _claude(endpoint: Endpoint, folder: Path) -> Settings:
    models = ("OPUS", "SONNET", "HAIKU")
    environ = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
        **{f"ANTHROPIC_DEFAULT_{one}_MODEL": endpoint.model for one in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": endpoint.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_answer),
        # A line at the beginning of the prompt that differs in each chat: nothing after it would be
        # found in the cache. And a message for each turn, which stays in the prompt.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(_PATIENCE),
    }
    # Variables in the user's settings win over the environment, and those of this file over both.
    path = folder / "settings.json"
    return Settings(environ, ["--settings", str(path)], {path.name: {"env": environ}})


def _opencode(endpoint: Endpoint, _folder: Path) -> Settings:
    model = f"{PROVIDER}/{endpoint.model}"
    described = {
        "name": endpoint.model,
        "limit": {"context": endpoint.context, "output": endpoint.max_answer},
        "tool_call": True,
        "attachment": endpoint.sees_images,
        "modalities": {"input": endpoint.inputs, "output": ["text"]},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {
            "baseURL": endpoint.v1,
            "apiKey": f"{{env:{KEY_VARIABLE}}}",
            "timeout": _PATIENCE,
        },
        "models": {endpoint.model: described},
    }
    config = {
        "provider": {PROVIDER: provider},
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
    }
    return Settings(
        {
            KEY_VARIABLE: endpoint.api_key,
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def _qwen(endpoint: Endpoint, folder: Path) -> Settings:
    defaults = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "model": {
            "generationConfig": {"contextWindowSize": endpoint.context, "timeout": _PATIENCE}
        },
    }
    path = folder / "defaults.json"
    environ = {
        "OPENAI_BASE_URL": endpoint.v1,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(path),
    }
    words = ["--auth-type", "openai", "--model", endpoint.model]
    return Settings(environ, words, {path.name: defaults})


def _cline(endpoint: Endpoint, folder: Path) -> Settings:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": endpoint.api_key,
        "model": endpoint.model,
        "baseUrl": endpoint.v1,
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.max_answer,
        "timeout": _PATIENCE,
    }
    stored = {
        "settings": settings,
        "updatedAt": "1970-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    path = folder / "providers.json"
    all_ = {
        "version": 1,
        "lastUsedProvider": provider,
        "modes": {},
        "providers": {provider: stored},
    }
    words = ["--provider", provider, "--model", endpoint.model]
    return Settings({"CLINE_PROVIDER_SETTINGS_PATH": str(path)}, words, {path.name: all_})


def _continue(endpoint: Endpoint, folder: Path) -> Settings:
    model = {
        "name": endpoint.model,
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": endpoint.v1,
        "apiKey": endpoint.api_key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *["image_input"] * endpoint.sees_images],
        "defaultCompletionOptions": {
            "contextLength": endpoint.context,
            "maxTokens": endpoint.max_answer,
        },
    }
    config = {"name": PROVIDER, "version": "1.0.0", "schema": "v1", "models": [model]}
    path = folder / "config.yaml"  # JSON is YAML, too
    environ = {"CONTINUE_TELEMETRY_ENABLED": "0"}
    return Settings(environ, ["--config", str(path)], {path.name: config})


def _pi(endpoint: Endpoint, folder: Path) -> Settings:
    provider = {
        "name": PROVIDER,
        "baseUrl": endpoint.v1,
        "apiKey": KEY_VARIABLE,
        "api": "openai-completions",
        "models": [endpoint.described(reasoning=True)],
    }
    call = f"pi.registerProvider({json.dumps(PROVIDER)}, {json.dumps(provider)});"
    path = folder / "trioserve.js"
    return Settings(
        {KEY_VARIABLE: endpoint.api_key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        ["-e", str(path), "--provider", PROVIDER, "--model", endpoint.model],
        {path.name: f"export default function (pi) {{ {call} }}\n"},
    )


def _aider(endpoint: Endpoint, folder: Path) -> Settings:
    model = f"openai/{endpoint.model}"
    metadata = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": endpoint.context,
        "max_tokens": endpoint.max_answer,
        "max_output_tokens": endpoint.max_answer,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "supports_vision": endpoint.sees_images,
    }
    path = folder / "metadata.json"
    environ = {
        "AIDER_OPENAI_API_BASE": endpoint.v1,
        "AIDER_OPENAI_API_KEY": endpoint.api_key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # read from the package, not from the network
    }
    models = chain(*((flag, model) for flag in ("--model", "--weak-model", "--editor-model")))
    words = [*models, "--model-metadata-file", str(path)]
    words += ["--no-show-model-warnings", "--no-check-update", "--no-analytics"]
    return Settings(environ, words, {path.name: {model: metadata}})


def _gptme(endpoint: Endpoint, _folder: Path) -> Settings:
    environ = {
        "OPENAI_BASE_URL": endpoint.v1,
        "OPENAI_API_KEY": endpoint.api_key,
        "GPTME_CONTEXT_LENGTH": str(endpoint.context),
        "GPTME_TIKTOKEN_TIMEOUT": "0",  # count by characters, and download no vocabulary
    }
    return Settings(environ, ["--model", f"local/{endpoint.model}", "--tool-format", "tool"])


def _copilot(endpoint: Endpoint, _folder: Path) -> Settings:
    return Settings(
        {
            "COPILOT_PROVIDER_BASE_URL": endpoint.v1,
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": endpoint.api_key,
            "COPILOT_PROVIDER_WIRE_API": "completions",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(endpoint.context - endpoint.max_answer),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(endpoint.max_answer),
            "COPILOT_MODEL": endpoint.model,
            "COPILOT_OFFLINE": "true",
            "COPILOT_AUTO_UPDATE": "false",
        }
    )


def _droid(endpoint: Endpoint, folder: Path) -> Settings:
    name = f"custom:{PROVIDER}"
    model = {
        "id": name,
        "model": endpoint.model,
        "displayName": endpoint.model,
        "baseUrl": endpoint.v1,
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "provider": "generic-chat-completion-api",
        "maxContextLimit": endpoint.context,
        "maxOutputTokens": endpoint.max_answer,
        "noImageSupport": not endpoint.sees_images,
    }
    path = folder / "settings.json"
    settings = {"customModels": [model], "sessionDefaultSettings": {"model": name}}
    environ = {
        KEY_VARIABLE: endpoint.api_key,
        "FACTORY_RUNTIME_SETTINGS_PATH": str(path),
        "FACTORY_AIRGAP_ENABLED": "true",  # no telemetry, and no search for updates
    }
    return Settings(environ, files={path.name: settings})


def _goose(endpoint: Endpoint, _folder: Path) -> Settings:
    return Settings(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": endpoint.model,
            "GOOSE_CONTEXT_LIMIT": str(endpoint.context),
            "GOOSE_TELEMETRY_ENABLED": "false",
            "OPENAI_HOST": endpoint.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_TIMEOUT": str(_PATIENCE // 1000),
        }
    )


def _hermes(endpoint: Endpoint, _folder: Path) -> Settings:
    environ = {"CUSTOM_BASE_URL": endpoint.v1, "OPENAI_API_KEY": endpoint.api_key}
    return Settings(environ, ["--provider", "custom", "--model", endpoint.model])


#: The agents, by the word that names each on the command line.
AGENTS: Mapping[str, Agent] = {
    "codex": Agent(
        "Codex", "codex", "npm install -g @openai/codex", _codex, 9_000,
        asked=["debug", "models"],
    ),
    "claude": Agent(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude, 20_000,
        cleared=["ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"],
    ),
    "opencode": Agent("opencode", "opencode", "npm install -g opencode-ai", _opencode, 8_000),
    "qwen": Agent("Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen, 19_000),
    "cline": Agent("Cline", "cline", "npm install -g cline", _cline, 5_500),
    "continue": Agent("Continue", "cn", "npm install -g @continuedev/cli", _continue, 2_000),
    "pi": Agent("pi", "pi", "npm install -g @mariozechner/pi-coding-agent", _pi, 1_500),
    "copilot": Agent(
        "GitHub Copilot CLI", "copilot", "npm install -g @github/copilot", _copilot, 15_000,
        cleared=["COPILOT_PROVIDER_BEARER_TOKEN", "COPILOT_PROVIDER_HEADERS",
                 "COPILOT_PROVIDER_MODEL_ID", "COPILOT_PROVIDER_WIRE_MODEL"],
    ),
    "droid": Agent("Droid", "droid", "npm install -g droid", _droid, 10_000),
    "goose": Agent(
        "goose", "goose", "the installer at https://goose-docs.ai", _goose, 5_000,
        cleared=["OPENAI_BASE_URL", "OPENAI_CUSTOM_HEADERS", "OPENAI_ORGANIZATION",
                 "OPENAI_PROJECT"],
    ),
    "hermes": Agent("Hermes", "hermes", "pip install hermes-agent", _hermes, 15_000),
    "aider": Agent("aider", "aider", "pip install aider-chat", _aider, 1_000),
    "gptme": Agent("gptme", "gptme", "pip install gptme", _gptme, 9_000),
}  # fmt: skip
