"""The schemas that generators write: all that the grammar of one allows is JSON that follows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.grammar_bench import refusal, schema
from tests.support.schema_set import examine
from tests.support.served_model import ServedModel, served
from tests.support.tool_schemas import GENERATED
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend

pytestmark = pytest.mark.usefixtures("no_trials")

#: Keywords that no grammar can enforce, by name, and the place that the error names.
REFUSED = {
    "schemars1 set": "the keyword 'uniqueItems' is not supported, at #/properties/s/uniqueItems",
    "pydantic set": "the keyword 'uniqueItems' is not supported, at #/properties/x/uniqueItems",
    "zod duration": "look-ahead and look-behind, is not supported",
    "zod record of UUIDs": "the keyword 'propertyNames' is not supported, at #/propertyNames",
}


@pytest.mark.parametrize("name", sorted(GENERATED.keys() - REFUSED.keys()))
def test_a_schema_is_enforced(backend: LlamaBackend, name: str) -> None:
    report = examine(backend, [GENERATED[name]], n_outputs=1, max_tokens=400)
    assert report.refused == {}
    assert report.invalid == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_enforced_is_named(backend: LlamaBackend, name: str) -> None:
    assert REFUSED[name] in refusal(backend, schema(GENERATED[name]))


RECORD = GENERATED["zod record of an enum"]
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedModel]:
    with served(Config(threads=1, ctx_size=2048, parallel=1)) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "field", "find"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": RECORD}}},
            lambda answer: answer["choices"][0]["message"]["content"],
        ),
        ("/completion", {"prompt": "a", "json_schema": RECORD}, lambda answer: answer["content"]),
        (
            "/v1/responses",
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": RECORD}},
            },
            lambda answer: answer["output"][-1]["content"][0]["text"],
        ),
        (
            "/api/chat",
            {"format": RECORD, "stream": False},
            lambda answer: answer["message"]["content"],
        ),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"json": RECORD}},
            lambda answer: answer["choices"][0]["text"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_field_takes_them(
    server: ServedModel, path: str, field: dict[str, Any], find: Callable[[Any], str]
) -> None:
    chat = {} if "prompt" in field or "input" in field else {"messages": MESSAGES}
    output = find(server.post(path, {"model": "m", "temperature": 0, **chat, **field}))
    assert json.loads(output).keys() == {"a", "b"}
