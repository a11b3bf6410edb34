"""Tools for tests of grammars, the texts that a grammar allows, and how they are read."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema

from tests.support.families import FUNCTIONARY_3_2
from tests.support.message_writers import Writer
from tests.support.parsing import parse
from trioserve.chat.deltas import Message
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.params import ToolChoice
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.matcher import CompiledGrammar, Matcher
from trioserve.types import Grammar

REQUIRED = ToolChoice("required")


AUTO = ToolChoice("auto")


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def strict(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    """The same tools, whose schemas have to be enforced."""
    return [{**one, "function": {**one["function"], "strict": True}} for one in tools]


def taking(schema: Any, **others: Any) -> list[dict[str, Any]]:
    """A tool with one argument of this schema."""
    properties = {"a": schema, **others}
    return [tool("f", {"type": "object", "properties": properties, "required": ["a"]})]


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "loud": {"type": "boolean"},
        "note": {"type": ["string", "null"], "maxLength": 5},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "n": {"type": "string", "maxLength": 5}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days"],
}


KEY: dict[str, Any] = {
    "type": "object",
    "properties": {"k": {"$ref": "#/$defs/K"}},
    "required": ["k"],
    "$defs": {"K": {"enum": ["a", "b"]}},
}


TOOLS = [tool("get_weather", WEATHER), tool("stop"), tool("get", KEY)]


def compiled(backend: LlamaBackend, grammar: Grammar | None) -> CompiledGrammar:
    assert grammar is not None
    constraint = backend.compile(grammar)
    assert isinstance(constraint, CompiledGrammar)
    return constraint


def walk(
    backend: LlamaBackend, grammar: CompiledGrammar, seed: int, closers: Sequence[str] = ()
) -> list[int] | None:
    """Draw tokens that the grammar allows, up to its end; None if that does not come soon.

    After a while it writes what ends things, where that is allowed.
    """
    vocab, draw = backend.vocab, random.Random(seed)
    ends = vocab.end_of_generation
    marks = [*closers, *(f"\n{text}" for text in closers), '"', "}", "]", ")"]
    endings = [vocab.tokenize(text) for text in marks]
    matcher = grammar.matcher()
    tokens: list[int] = []
    try:
        while len(tokens) < 250:
            allowed = matcher.mask().ids.tolist()
            if ends.intersection(allowed) and (len(tokens) > 30 or draw.random() < 0.3):
                return tokens
            others = [one for one in allowed if one not in ends]
            if not others:
                return tokens
            drawn = [draw.choice(others)]
            if len(tokens) > 30:
                fitting = [one for one in endings if _fits(matcher, one)]
                drawn = list(draw.choice(fitting)) if fitting else drawn
            for token in drawn:
                if token not in matcher.mask():
                    break  # text that must come is to come in the usual tokens
                matcher.accept(token)
                grammar.pool.start()
                tokens.append(token)
    finally:
        matcher.close()
    return None


def _fits(matcher: Matcher, tokens: Sequence[int]) -> bool:
    allowed = tokens[0] in matcher.mask()
    return allowed and matcher._matcher.validate_tokens(list(tokens)) == len(tokens)


def texts(
    backend: LlamaBackend, grammar: Grammar | None, count: int, format: ChatFormat
) -> list[str]:
    """Texts that a grammar allows."""
    ready = compiled(backend, grammar)
    closers = sorted(format.texts)
    walks = (walk(backend, ready, seed, closers) for seed in range(6 * count))
    whole = itertools.islice((tokens for tokens in walks if tokens is not None), count)
    found = [backend.vocab.detokenize(tokens).decode() for tokens in whole]
    assert found
    return found


def read(
    text: str, format: ChatFormat, tools: Sequence[Any], tail: str, pieces: Sequence[str] = ()
) -> Message:
    return parse(pieces or [text], format, tools=tools, prompt_tail=tail)


def split(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(8))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def tail_of(writer: Writer) -> str:
    """The end of a prompt that leaves nothing open but the answer."""
    if writer.format.reasoning is not None:
        return writer.format.reasoning.end
    return ">>>" if writer.format is FUNCTIONARY_3_2 else writer.prompt


def check_calls(message: Message, tools: Sequence[dict[str, Any]], *, parallel: bool) -> None:
    assert message.tool_calls
    assert parallel or len(message.tool_calls) == 1
    schemas = {one["function"]["name"]: one["function"].get("parameters", {}) for one in tools}
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, schemas[call.name])
        assert arguments.keys() <= schemas[call.name].get("properties", {}).keys()


#: A format of every kind of notation.
NOTATIONS = (
    "hermes",
    "qwen3-coder",
    "glm-4",
    "deepseek-v3.2",
    "kimi-k3",
    "minicpm-5",
    "minimax-m3",
    "lfm2",
    "gemma-4",
    "harmony",
)


def allows(backend: LlamaBackend, grammar: Grammar | None, text: str) -> bool:
    """True if a grammar allows a text, from its beginning to its end."""
    matcher = compiled(backend, grammar).matcher()
    try:
        for token in backend.vocab.tokenize(text):
            if token not in matcher.mask():
                return False
            matcher.accept(token)
        return bool(backend.vocab.end_of_generation.intersection(matcher.mask().ids.tolist()))
    finally:
        matcher.close()
