"""Hostile requests, drawn from the API's own description: none breaks the server.

A short, always equal version of what `make fuzz` does for minutes (`tests/fuzz.py`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio

from tests.support.clients import client_and_service
from tests.support.http_server import slots_in_use
from tests.support.scripts import BASE
from tests.support.waiting import patiently
from trioserve.testing import ScriptedBackend

#: The fields that a request needs before its other fields are looked at.

HOSTILE = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    -(2**63),
    10**400,
    1e-320,
    1e308,
    0.5,
    "",
    "a",
    "\x00",
    "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
    "😀" * 50,
    [],
    [None],
    [[]],
    ["a", 1],
    [{}],
    [[0, False], ["a", 1e9]],
    {},
    {"": None},
    {"type": "text"},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
    {"a": [{"b": [[[[{}]]]]}]},
)

#: Headers that make a stream outlive its connection, and others that are hostile.
HEADERS = (
    *({},) * 6,
    {"X-Conversation-Id": "one"},
    {"X-Conversation-Id": "::\t::"},
    {"Prefer": "respond-async, wait=1"},
    {"Prefer": "respond-async;,=,wait=99999999999999", "X-Conversation-Id": "two"},
)

N_REQUESTS = 300

#: Statuses that are no faults: a feature is missing or switched off.
FINE = (501,)

#: The message of a script that has no answer for the grammar. A model follows any grammar.
NO_MODEL = "The script does not follow the grammar"


def draw(described: dict[str, Any], chance: random.Random) -> tuple[str, dict[str, Any], bool]:
    """Draw a route, a body with some hostile fields, and True if the body is a form."""
    posts = [
        (path, methods["post"])
        for path, methods in sorted(described["paths"].items())
        if "requestBody" in methods.get("post", {})
    ]
    path, operation = chance.choice(posts)
    ((kind, content),) = operation["requestBody"]["content"].items()
    reference = content["schema"]["$ref"]
    schema = described["components"]["schemas"][reference.rpartition("/")[2]]
    body: dict[str, Any] = dict(BASE)
    names = sorted(schema["properties"])
    for name in chance.sample(names, min(chance.choice((1, 1, 2, 3)), len(names))):
        body[name] = chance.choice(HOSTILE)
    return path.replace("{", "").replace("}", ""), body, kind == "multipart/form-data"


def form_of(body: dict[str, Any]) -> dict[str, Any]:
    """Write a body as a form with a file."""
    fields = {name: (None, str(value)) for name, value in body.items() if name != "file"}
    return {"files": {**fields, "file": ("speech.wav", b"RIFF....WAVE")}}


@pytest.mark.system
async def test_hostile_requests_get_an_answer() -> None:
    chance = random.Random(0)
    backend = ScriptedBackend(n_slots=4)
    statuses = set()
    async with (
        client_and_service(backend) as (client, service),
    ):
        described = (await client.get("/openapi.json")).json()
        for _ in range(N_REQUESTS):
            path, body, is_form = draw(described, chance)
            headers = chance.choice(HEADERS)
            content: dict[str, Any] = form_of(body) if is_form else {"json": body}
            answer = await client.post(path, headers=headers, **content)
            if NO_MODEL in answer.text:
                continue
            assert answer.status_code < 500 or answer.status_code in FINE, (path, body, answer.text)
            statuses.add(answer.status_code)
        assert {200, 400} <= statuses
        with patiently():
            while await slots_in_use(service):
                await trio.lowlevel.checkpoint()
