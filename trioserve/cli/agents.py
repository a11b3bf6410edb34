"""The programs that ``trioserve launch`` starts or configures, and their settings to use a server.

`agents.toml` has their settings. Those of an agent hold for one run: arguments, environment
variables, and files in a temporary folder. They win over the configuration of the agent, which
stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import attrs
import msgspec

#: The key of a server without keys: agents refuse to start without one.
NO_KEY = "none"

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
    def fields(self) -> Mapping[str, Any]:
        """The fields that templates name."""
        return {
            **attrs.asdict(self),
            "v1": f"{self.url}/v1",  # the URL as clients of OpenAI have it
            "max_answer": self.max_answer,
            "max_prompt": self.context - self.max_answer,
            "inputs": ["text", *["image"] * self.sees_images],
            "capabilities": ["tool_use", *["image_input"] * self.sees_images],
            "is_blind": not self.sees_images,
            "web_search": "live" if self.searches_web else "disabled",
            "patience_ms": _PATIENCE,
        }


def filled(template: Any, fields: Mapping[str, Any]) -> Any:
    """A template of `agents.toml` with the fields that it names."""
    match template:
        case str() if template[:1] == "$" and template[1:] in fields:
            return fields[template[1:]]
        case str():
            return Template(template).substitute(fields)
        case list():
            return [filled(each, fields) for each in template]
        case dict():
            return {filled(key, fields): filled(each, fields) for key, each in template.items()}
    return template


def _texts(values: Mapping[str, object]) -> Mapping[str, str]:
    return {name: it if isinstance(it, str) else json.dumps(it) for name, it in values.items()}


@attrs.frozen
class Settings:
    """Settings to start an agent with. `files` go into the folder of the run."""

    environ: Mapping[str, str]
    arguments: Sequence[str]
    files: Mapping[str, str]


class Agent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A program that edits code with the help of a model; its settings are templates.

    Attributes:
        title: its name.
        program: the command that starts it.
        install: the command that installs it.
        first_prompt: about how many tokens its first request has.
        environ: variables; those that are no text are JSON.
        arguments: begin its command line.
        files: those that are no text are JSON.
        cleared: variables of the environment that would win over the settings.
        asked: its arguments to print the models that it knows (Codex).
        config: settings that are arguments (Codex).
        provider: the argument of a call in a file of JavaScript (pi).
    """

    title: str
    program: str
    install: str
    first_prompt: int
    environ: dict[str, Any] = {}
    arguments: list[str] = []
    files: dict[str, Any] = {}
    cleared: list[str] = []
    asked: list[str] = []
    config: dict[str, Any] = {}
    provider: dict[str, Any] = {}

    def settings(self, endpoint: Endpoint, folder: Path) -> Settings:
        """Make the settings for an endpoint, and for the folder of the run."""
        fields = {**endpoint.fields, "folder": str(folder)}
        environ = fields["environ"] = _texts(filled(self.environ, fields))
        arguments, files = filled([self.arguments, self.files], fields)
        config, provider = filled([self.config, self.provider], fields)
        if config and (catalogue := _catalogue(endpoint)):
            files["models.json"] = catalogue
            config["model_catalog_json"] = str(folder / "models.json")
        for name, value in config.items():
            # It is TOML, whose strings, numbers and booleans are those of JSON.
            arguments += ["-c", f"{name}={json.dumps(value)}"]
        if provider:
            call = f"pi.registerProvider({json.dumps(provider['name'])}, {json.dumps(provider)});"
            files["trioserve.js"] = f"export default function (pi) {{ {call} }}\n"
        return Settings(environ, arguments, _texts(files))


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
        "input_modalities": endpoint.fields["inputs"],
    }
    return {"models": [model]}


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """A value in a file of settings, and its path; see `trioserve.cli.jsonc.Step`."""

    path: list[str | tuple[str, str]]
    value: Any


class Configured(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A program with a file that says which models it has.

    Attributes:
        title: its name.
        place: the file.
        edits: its changes for an endpoint.
        then: the next thing that the user does.
    """

    title: str
    place: str
    edits: list[Edit]
    then: str


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    agents: dict[str, Agent]
    configured: dict[str, Configured]


_table = msgspec.toml.decode(Path(__file__).with_name("agents.toml").read_bytes(), type=_Table)

#: By the words that name them on the command line.
AGENTS: Mapping[str, Agent] = _table.agents
CONFIGURED: Mapping[str, Configured] = _table.configured
