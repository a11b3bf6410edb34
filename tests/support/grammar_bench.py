"""An engine on llama.cpp, stepping by hand, for tests of grammars."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from tests.support.engine_events import take_events
from trioserve.engine import DecodeMaximal, Engine
from trioserve.errors import InvalidRequestError
from trioserve.llama.backend import LlamaBackend
from trioserve.types import (
    Chunk,
    Failed,
    Finished,
    FinishReason,
    GenerationParams,
    Grammar,
    Prompt,
    SamplingParams,
    Task,
)

PROMPT = "Once upon a time"


GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """An engine stepping by hand. It does not own the backend."""

    def __init__(self, backend: LlamaBackend) -> None:
        self.backend = backend
        self.engine = Engine(backend, DecodeMaximal(), lambda: None)
        self.text: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.probs: dict[int, list[Any]] = {}
        self.ends: dict[int, Finished | Failed] = {}

    def submit(
        self, task_id: int, grammar: Grammar | None, prompt: str = PROMPT, **params: Any
    ) -> None:
        constraint = None if grammar is None else self.backend.compile(grammar)
        params.setdefault("max_tokens", 200)
        params.setdefault("cache_prompt", False)
        self.text[task_id], self.tokens[task_id], self.probs[task_id] = "", [], []
        task = Task(
            task_id,
            Prompt(self.backend.vocab.tokenize(prompt)),
            GenerationParams(grammar=grammar, **params),
            constraint=constraint,
        )
        self.engine.submit(task)

    def step(self) -> bool:
        more = self.engine.step()
        for event in take_events(self.engine):
            if isinstance(event, Chunk):
                self.text[event.task_id] += event.text
                self.tokens[event.task_id] += event.tokens
                self.probs[event.task_id] += event.probs
            elif isinstance(event, Finished | Failed):
                self.ends[event.task_id] = event
        return more

    def run(self) -> None:
        while self.step():
            pass

    def reason(self, task_id: int) -> FinishReason:
        end = self.ends[task_id]
        assert isinstance(end, Finished), end
        return end.reason


def generate(backend: LlamaBackend, grammar: Grammar, **params: Any) -> tuple[str, FinishReason]:
    bench = Bench(backend)
    bench.submit(1, grammar, **params)
    bench.run()
    return bench.text[1], bench.reason(1)


def refusal(backend: LlamaBackend, grammar: Grammar) -> str:
    """The error for a grammar, which must come quickly."""
    backend.compile(Grammar("regex", "warm"))  # makes the tokenizer
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        backend.compile(grammar)
    assert time.perf_counter() - start < 20
    assert caught.value.param == grammar.param
    assert f"'{grammar.param}'" in caught.value.message
    return caught.value.message


def schema(value: Any, param: str = "response_format") -> Grammar:
    return Grammar("json_schema", json.dumps(value), param=param)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            names = set(schema["properties"])
            return (
                isinstance(value, dict)
                and set(schema.get("required", ())) <= set(value) <= names
                and all(is_valid(value[name], schema["properties"][name]) for name in value)
            )
        case "array":
            low, high = schema.get("minItems", 0), schema.get("maxItems", 10**9)
            return (
                isinstance(value, list)
                and low <= len(value) <= high
                and all(is_valid(item, schema["items"]) for item in value)
            )
        case "string":
            return (
                isinstance(value, str)
                and len(value) <= schema.get("maxLength", 10**9)
                and re.search(schema.get("pattern", ""), value) is not None
            )
        case "integer" | "number":
            kinds = int if schema["type"] == "integer" else (int, float)
            return (
                isinstance(value, kinds)
                and not isinstance(value, bool)
                and schema.get("minimum", -1e99) <= value <= schema.get("maximum", 1e99)
            )
        case "boolean":
            return isinstance(value, bool)
        case kind:
            raise AssertionError(kind)


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "enum": {"enum": ["red", "green", 3, None, {"a": [True]}]},
    "object": an_object(
        name={"type": "string", "maxLength": 12}, old={"type": "boolean"}, sort={"enum": ["x", "y"]}
    ),
    "nested": an_object(
        a=an_object(b=an_object(c={"type": "integer", "minimum": 0, "maximum": 9})),
        d={"type": "array", "items": an_object(e={"type": "boolean"}), "maxItems": 2},
    ),
    "array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 5},
        "minItems": 3,
        "maxItems": 5,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "integer": {"type": "integer", "minimum": 17, "maximum": 4321},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.5},
}
