"""What Ollama's clients are told of models, made of plain data: a server has one, a router many."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from trioserve._version import __version__
from trioserve.chat.template.render import ChatTemplate
from trioserve.types import Modalities

#: The version of Ollama whose API the routes follow. Clients refuse to talk to older ones.
OLLAMA_VERSION = "0.12.11"

#: When a model is unloaded that is not: clients take it for "never".
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)

#: What llama.cpp says after the name of a quantization, and what others write.
_SIZES = {"Small": "_S", "Medium": "_M", "Large": "_L"}
_NUMBER = re.compile(r"-?\d+")


@attrs.frozen(kw_only=True)
class Described:
    """What is known of a model."""

    name: str
    size: int  # bytes
    modified: float  # seconds since the epoch
    architecture: str = ""
    n_params: int = 0
    quantization: str = ""  # as llama.cpp writes it, such as "Q4_K - Medium"

    @property
    def entry(self) -> dict[str, Any]:
        """The fields that it has in every list."""
        return {
            "name": self.name,
            "model": self.name,
            "size": self.size,
            "digest": self.digest,
            "details": self.details,
        }

    @property
    def digest(self) -> str:
        """A number that changes with the file. Ollama's is a hash of the content."""
        return hashlib.sha256(f"{self.name}\n{int(self.modified)}".encode()).hexdigest()

    @property
    def details(self) -> dict[str, Any]:
        """The same in the lists and alone."""
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.architecture,
            "families": [self.architecture] if self.architecture else [],
            "parameter_size": human_number(self.n_params),
            "quantization_level": quantization_name(self.quantization),
        }


def version() -> dict[str, Any]:
    """Answer ``GET /api/version``."""
    return {"version": OLLAMA_VERSION, "trioserve": __version__}


def tags(models: Iterable[Described]) -> dict[str, Any]:
    """Answer ``GET /api/tags``: all models that there are, the newest first."""
    newest_first = sorted(models, key=lambda one: -one.modified)
    return {"models": [{**one.entry, "modified_at": _moment(one.modified)} for one in newest_first]}


@attrs.frozen(kw_only=True)
class Loaded:
    """A model that is in memory, and until when: seconds since the epoch; None: for good."""

    model: Described
    n_ctx: int
    expires: float | None = None


def processes(models: Iterable[Loaded]) -> dict[str, Any]:
    """Answer ``GET /api/ps``: the models that are in memory."""
    return {
        "models": [
            {
                **one.model.entry,
                "expires_at": rfc3339(_NEVER) if one.expires is None else _moment(one.expires),
                "context_length": one.n_ctx,
            }
            for one in models
        ]
    }


def show(
    model: Described,
    *,
    path: str,
    template: str,
    metadata: Mapping[str, Any],
    parameters: Mapping[str, Any],
    capabilities: Sequence[str],
) -> dict[str, Any]:
    """Answer ``POST /api/show``.

    Args:
        model: what the lists say of it.
        path: of its first file.
        template: the chat template, in Jinja.
        metadata: of the GGUF file.
        parameters: what holds for requests that do not say.
        capabilities: such as "completion" and "tools".
    """
    info = {key: _value(key, value) for key, value in metadata.items() if key not in _NOT_SHOWN}
    return {
        "license": str(metadata.get("general.license", "")),
        "modelfile": f"FROM {path}\n",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in _pairs(parameters)),
        "template": template,
        "details": model.details,
        "model_info": info | {"general.parameter_count": model.n_params},
        "capabilities": list(capabilities),
        "modified_at": _moment(model.modified),
    }


def can_think(template: ChatTemplate) -> bool:
    """Whether a model may reason before it answers, as far as its template tells."""
    return template.format.thinking is not None or template.capabilities.supports_enable_thinking


def capabilities(template: ChatTemplate, *, fills_gaps: bool, modalities: Modalities) -> list[str]:
    """Say what a model that makes text can do, in Ollama's words."""
    can = {
        "completion": True,
        "tools": template.capabilities.supports_tools,
        "thinking": can_think(template),
        "insert": fills_gaps,
        "vision": modalities.vision,
        "audio": modalities.audio,
    }
    return [name for name, is_so in can.items() if is_so]


_NOT_SHOWN = frozenset({"general.name", "tokenizer.chat_template"})  # as in Ollama


def _pairs(parameters: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in parameters.items():
        for each in value if isinstance(value, tuple) else (value,):
            yield name, f'"{each}"' if isinstance(each, str) else each


def _value(key: str, value: Any) -> Any:
    """Read a value that llama.cpp gives as text. In ``general`` only whole numbers are no text."""
    if not isinstance(value, str):
        return value
    if _NUMBER.fullmatch(value) and len(value) < 20:
        return int(value)
    if key.startswith("general."):
        return value
    if value in ("true", "false"):
        return value == "true"
    try:
        return float(value)
    except ValueError:
        return value


def human_number(n: int) -> str:
    """Write a number of parameters: 4.3B, 270M."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            return f"{n / unit:.1f}".removesuffix(".0") + letter
    return str(n)


def quantization_name(ftype: str) -> str:
    """Write a type of file as the names of models have it: Q4_K_M for "Q4_K - Medium"."""
    words = ftype.removeprefix("all ").split()
    if not words:
        return ""
    name = words[0]
    size = next((_SIZES[word] for word in words[1:] if word in _SIZES), "")
    return name if name == "Q2_K" and size == "_M" else name + size


def rfc3339(moment: datetime) -> str:
    """Write a moment as Ollama does, in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _moment(seconds: float) -> str:
    return rfc3339(datetime.fromtimestamp(seconds, UTC))
