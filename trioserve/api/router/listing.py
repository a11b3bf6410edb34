"""How a router lists its models, in a form that the clients of all APIs can read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from trioserve.models.catalog import ModelEntry, Source
from trioserve.router.states import ModelState, Status
from trioserve.types import Modalities

#: The sources, in the words of llama-server where it has them.
_SOURCES: Mapping[Source, str] = {
    Source.BUNDLED: "bundled",
    Source.CACHE: "cache",
    Source.DIRECTORY: "models_dir",
    Source.PRESET: "preset",
}


def model(entry: ModelEntry, state: ModelState, modalities: Modalities) -> dict[str, Any]:
    """Describe a model, for clients of llama-server, OpenAI and Anthropic.

    Once it has been loaded, its process has said what it is. Until then, `modalities` are known.
    """
    created = 0 if entry.version is None else entry.version[0] // 10**9
    described: dict[str, Any] = {
        "id": entry.name,
        "aliases": list(entry.aliases),
        "tags": list(entry.tags),
        "object": "model",
        "owned_by": "trioserve",
        "created": created,
        "status": status(entry, state),
        "source": _SOURCES[entry.source],
        "can_remove": entry.source is Source.CACHE,
        "path": None if entry.path is None else str(entry.path),
        "size": entry.size,
        # as Anthropic's clients read it
        "type": "model",
        "display_name": entry.name,
        "created_at": _time(created),
    }
    takes = {"input_modalities": modalities.names, "output_modalities": ["text"]}
    return {"architecture": takes, **state.info, **described}


def downloading(name: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a model that is not here yet."""
    return {
        "id": name,
        "object": "model",
        "owned_by": "trioserve",
        "created": 0,
        "status": {"value": Status.DOWNLOADING.value, "progress": progress},
        "type": "model",
        "display_name": name,
        "created_at": _time(0),
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def status(entry: ModelEntry, state: ModelState) -> dict[str, Any]:
    """Say what a model does. What is not known, or not so, is left out."""
    written: dict[str, Any] = {
        "value": state.value.value,
        "args": list(state.args or entry.args),
    }
    more: dict[str, Any] = {
        "progress": state.progress,
        "pid": state.pid,
        "memory": state.memory,
        "last_used": state.last_used,
    }
    if state.failed:
        more |= {
            "failed": True,
            "exit_code": state.exit_code,
            "message": state.message,
            "log": list(state.log_tail),
        }
    return written | {name: value for name, value in more.items() if value is not None}


def page(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Make the answer that lists models. It is always one page, in Anthropic's words."""
    return {
        "data": models,
        "object": "list",
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }
