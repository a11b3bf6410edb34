"""Requests in the shape in which programs send them, by program: what a server has to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import yaml


@attrs.frozen(kw_only=True)
class ClientRequest:
    """A request of a program, and what it is. Without a body, it is a GET."""

    program: str
    name: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return f"{self.program}: {self.name}"


USER = {"role": "user", "content": "Hi"}
#: A request for JSON. A script answers it with `FILLED`.
FILL = {"role": "user", "content": "Fill in the form."}
FILLED = '{"title": "A", "tags": null}'
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

_TEXT = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
REQUESTS = [
    ClientRequest(program=program, **one)
    for program, requests in yaml.load(_TEXT, yaml.CSafeLoader).items()
    for one in requests
]
