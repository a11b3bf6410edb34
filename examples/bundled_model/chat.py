"""The chat template, rendered the way a server renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_PATH = Path(__file__).with_name("template.jinja")

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


def _to_json(value: object, indent: int | None = None) -> str:
    """Dump JSON as it is: no escapes for HTML, none for letters outside ASCII."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(template_source())


def template_source() -> str:
    """Return the template's text, as it goes into the GGUF file."""
    return TEMPLATE_PATH.read_text(encoding="utf-8").rstrip("\n")


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    thinking: bool = False,
    prompt: bool = False,
) -> str:
    """Render a conversation; with ``prompt`` it ends where the model continues."""
    return _template().render(
        messages=messages,
        tools=tools,
        enable_thinking=thinking,
        add_generation_prompt=prompt,
    )
