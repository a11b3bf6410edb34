"""The coding agents that ``trioserve launch`` starts, and their settings to use a server.

The settings hold for one run: arguments, environment variables, and files in a temporary folder.
They win over the configuration of the agent, which stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

#: The variable that has the API key, for agents whose settings name a variable.
KEY_VARIABLE = "TRIOSERVE_API_KEY"

#: The key of a server without keys: agents refuse to start without one.
NO_KEY = "none"

#: The name of the provider, in agents that have several.
_PROVIDER = "trioserve"

#: Most tokens of an answer, for agents that must know; they leave as much of the context free.
_MAX_ANSWER = 32_000

#: Milliseconds for an answer to begin: reading a long prompt takes minutes on a CPU.
_PATIENCE = 3_600_000


@attrs.frozen(kw_only=True)
class Endpoint:
    """A model of a server: what an agent is to use.

    `url` ends before ``/v1``. `context` is the number of tokens that a request may have.
    `is_toy`: it is the bundled model.
    """

    url: str
    model: str
    context: int
    sees_images: bool = False
    is_toy: bool = False
    api_key: str = NO_KEY

    @property
    def max_answer(self) -> int:
        """The number of tokens to set aside for an answer."""
        return min(_MAX_ANSWER, self.context // 4)


@attrs.frozen(kw_only=True)
class Settings:
    """How an agent is started. `files` are written into the folder of the run."""

    arguments: Sequence[str] = ()
    environ: Mapping[str, str] = attrs.field(factory=dict)
    files: Mapping[str, str] = attrs.field(factory=dict)


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
    """

    title: str
    program: str
    install: str
    settings: Callable[[Endpoint, Path], Settings]
    first_prompt: int
    cleared: Sequence[str] = ()


def _codex(endpoint: Endpoint, _folder: Path) -> Settings:
    provider = f"model_providers.{_PROVIDER}"
    overrides: dict[str, str | int | bool] = {
        "model_provider": _PROVIDER,
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": f"{endpoint.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": KEY_VARIABLE,
        f"{provider}.stream_idle_timeout_ms": _PATIENCE,
        "model": endpoint.model,
        "model_context_window": endpoint.context,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
    }
    # A value is TOML, whose strings, numbers and booleans are those of JSON.
    words = (("-c", f"{name}={json.dumps(value)}") for name, value in overrides.items())
    return Settings(
        arguments=[word for pair in words for word in pair],
        environ={KEY_VARIABLE: endpoint.api_key},
    )


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
        # A line that differs in each request, at the beginning of the prompt: nothing after it
        # would be found in the cache.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(_PATIENCE),
    }
    # Variables in the user's settings win over the environment, and those of this file over both.
    return Settings(
        arguments=["--settings", str(folder / "settings.json")],
        environ=environ,
        files={"settings.json": json.dumps({"env": environ})},
    )


def _opencode(endpoint: Endpoint, _folder: Path) -> Settings:
    model = f"{_PROVIDER}/{endpoint.model}"
    kinds = ["text", "image"] if endpoint.sees_images else ["text"]
    described = {
        "name": endpoint.model,
        "limit": {"context": endpoint.context, "output": endpoint.max_answer},
        "tool_call": True,
        "attachment": endpoint.sees_images,
        "modalities": {"input": kinds, "output": ["text"]},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _PROVIDER,
        "options": {
            "baseURL": f"{endpoint.url}/v1",
            "apiKey": f"{{env:{KEY_VARIABLE}}}",
            "timeout": _PATIENCE,
        },
        "models": {endpoint.model: described},
    }
    config = {
        "provider": {_PROVIDER: provider},
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
    }
    return Settings(
        environ={
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
    return Settings(
        arguments=["--auth-type", "openai", "--model", endpoint.model],
        environ={
            "OPENAI_BASE_URL": f"{endpoint.url}/v1",
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(folder / "defaults.json"),
        },
        files={"defaults.json": json.dumps(defaults)},
    )


def _cline(endpoint: Endpoint, folder: Path) -> Settings:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": endpoint.api_key,
        "model": endpoint.model,
        "baseUrl": f"{endpoint.url}/v1",
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.max_answer,
        "timeout": _PATIENCE,
    }
    stored = {
        "version": 1,
        "lastUsedProvider": provider,
        "modes": {},
        "providers": {
            provider: {
                "settings": settings,
                "updatedAt": "1970-01-01T00:00:00.000Z",
                "tokenSource": "manual",
            }
        },
    }
    path = folder / "providers.json"
    return Settings(
        arguments=["--provider", provider, "--model", endpoint.model],
        environ={"CLINE_PROVIDER_SETTINGS_PATH": str(path)},
        files={path.name: json.dumps(stored)},
    )


def _continue(endpoint: Endpoint, folder: Path) -> Settings:
    kinds = ["tool_use", "image_input"] if endpoint.sees_images else ["tool_use"]
    model = {
        "name": endpoint.model,
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": f"{endpoint.url}/v1",
        "apiKey": endpoint.api_key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": kinds,
        "defaultCompletionOptions": {
            "contextLength": endpoint.context,
            "maxTokens": endpoint.max_answer,
        },
    }
    config = {"name": _PROVIDER, "version": "1.0.0", "schema": "v1", "models": [model]}
    path = folder / "config.yaml"
    return Settings(
        arguments=["--config", str(path)],
        environ={"CONTINUE_TELEMETRY_ENABLED": "0"},
        files={path.name: json.dumps(config)},  # which is YAML, too
    )


def _pi(endpoint: Endpoint, folder: Path) -> Settings:
    model = {
        "id": endpoint.model,
        "name": endpoint.model,
        "reasoning": True,
        "input": ["text", "image"] if endpoint.sees_images else ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.max_answer,
    }
    provider = {
        "name": _PROVIDER,
        "baseUrl": f"{endpoint.url}/v1",
        "apiKey": KEY_VARIABLE,
        "api": "openai-completions",
        "models": [model],
    }
    call = f"pi.registerProvider({json.dumps(_PROVIDER)}, {json.dumps(provider)});"
    path = folder / "trioserve.js"
    return Settings(
        arguments=["-e", str(path), "--provider", _PROVIDER, "--model", endpoint.model],
        environ={KEY_VARIABLE: endpoint.api_key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={path.name: f"export default function (pi) {{ {call} }}\n"},
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
    flags = ["--no-show-model-warnings", "--no-check-update", "--no-analytics"]
    return Settings(
        arguments=[
            "--model",
            model,
            "--weak-model",
            model,
            "--editor-model",
            model,
            "--model-metadata-file",
            str(path),
            *flags,
        ],
        environ={
            "AIDER_OPENAI_API_BASE": f"{endpoint.url}/v1",
            "AIDER_OPENAI_API_KEY": endpoint.api_key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # read from the package, not from the network
        },
        files={path.name: json.dumps({model: metadata})},
    )


def _gptme(endpoint: Endpoint, _folder: Path) -> Settings:
    return Settings(
        arguments=["--model", f"local/{endpoint.model}", "--tool-format", "tool"],
        environ={
            "OPENAI_BASE_URL": f"{endpoint.url}/v1",
            "OPENAI_API_KEY": endpoint.api_key,
            "GPTME_CONTEXT_LENGTH": str(endpoint.context),
            "GPTME_TIKTOKEN_TIMEOUT": "0",  # count by characters, and download no vocabulary
        },
    )


#: The agents, by the word that names each on the command line.
AGENTS: Mapping[str, Agent] = {
    "codex": Agent("Codex", "codex", "npm install -g @openai/codex", _codex, 9_000),
    "claude": Agent(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude, 20_000,
        cleared=["ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"],
    ),
    "opencode": Agent("opencode", "opencode", "npm install -g opencode-ai", _opencode, 8_000),
    "qwen": Agent("Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen, 19_000),
    "cline": Agent("Cline", "cline", "npm install -g cline", _cline, 5_500),
    "continue": Agent("Continue", "cn", "npm install -g @continuedev/cli", _continue, 2_000),
    "pi": Agent("pi", "pi", "npm install -g @mariozechner/pi-coding-agent", _pi, 1_500),
    "aider": Agent("aider", "aider", "pip install aider-chat", _aider, 1_000),
    "gptme": Agent("gptme", "gptme", "pip install gptme", _gptme, 9_000),
}  # fmt: skip
