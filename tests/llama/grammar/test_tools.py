"""Grammars of many tools: the arguments of each are enforced once its name is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support import families
from tests.support.grammar_bench import generate
from tests.support.message_writers import WRITERS
from tests.support.tool_grammars import (
    AUTO,
    REQUIRED,
    TOOLS,
    check_calls,
    compiled,
    read,
    split,
    strict,
    tail_of,
    texts,
    tool,
)
from tests.support.tool_schemas import closed, obj
from trioserve.chat.formats.syntax import ChatFormat, JsonArguments, Marker, Name, ToolCalls
from trioserve.chat.grammar.answer import constrain
from trioserve.errors import InvalidRequestError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.matcher import Matcher
from trioserve.llama.grammar.tools import NameFinder
from trioserve.types import FinishReason


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch, backend: LlamaBackend) -> LlamaBackend:
    """Every grammar of tools grows."""
    monkeypatch.setattr("trioserve.llama.grammar.tools._MAX_AT_ONCE", 0)
    return backend


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_arguments_follow_the_schema_of_the_tool_that_was_named(
    growing: LlamaBackend, name: str
) -> None:
    writer = WRITERS[name]
    tail = tail_of(writer)
    grammar = constrain(
        writer.format, TOOLS, REQUIRED, parallel=True, prompt_tail=tail, owner="growing"
    )
    ready = growing.compile(grammar, "growing")
    assert ready.tools.grows
    for seed, text in enumerate(texts(growing, grammar, 3, writer.format)):
        message = read(text, writer.format, TOOLS, tail)
        assert message.content == "", text
        check_calls(message, TOOLS, parallel=True)
        assert read(text, writer.format, TOOLS, tail, split(text, seed)) == message


# -- names in an output


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"name": "get"', {0}),
        (b'{"name": "get', set()),
        (b'"get_all", "get"', {0, 1}),
        (b'"other"', set()),
    ],
)
def test_names_in_quotes(text: bytes, found: set[int]) -> None:
    assert NameFinder(['"get"', '"get_all"'], []).find(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"call:get{", {0}),
        (b"call: get{", {0}),
        (b"call:get", set()),  # or get_all
        (b"call:get_a", set()),
        (b"call:get_all", {1}),
        (b"call:get_x", {0}),
        (b"get{", set()),
        (NameFinder.START + b"get{", {0}),
    ],
)
def test_names_behind_a_text(text: bytes, found: set[int]) -> None:
    assert NameFinder(["get", "get_all"], ["call:"]).find(text) == found


def test_tools_of_one_name() -> None:
    assert NameFinder(["a", "a", "b"], []).find(b"a") == {0, 1}


# -- growing


def take(backend: LlamaBackend, matcher: Matcher, text: str) -> bool:
    """Have a matcher take a text, until it refuses a token."""
    for token in backend.vocab.tokenize(text, is_fragment=True):
        if token not in matcher.mask() or not matcher.accept(token):
            return False
        matcher._pool.start()
    return True


def many(**named: Any) -> list[dict[str, Any]]:
    """Tools among 60 others, so that arguments are enforced once a name is known."""
    others = [tool(f"other_{i}", obj("x", x={"type": "integer"})) for i in range(60)]
    return [*others, *(tool(name, schema) for name, schema in named.items())]


def test_any_arguments_until_the_name_is_known(backend: LlamaBackend) -> None:
    tools = many(get=obj("a", a={"type": "boolean"}))
    ready = compiled(backend, constrain(families.HERMES, tools, REQUIRED, parallel=True))
    for name, arguments, fits in (
        ("get", '{"a": true}', True),
        ("get", '{"b', False),
        ("other_7", '{"x": 12}', True),
        ("other_7", '{"x": t', False),
        ("unknown", "{}", False),
    ):
        matcher = ready.matcher()
        text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}'
        assert take(backend, matcher, text) is fits, text
        matcher.close()
    assert len(ready.tools._kept) == 2


def test_a_token_that_the_arguments_cannot_begin_with_is_refused(backend: LlamaBackend) -> None:
    tools = many(get=closed(obj()), get_all=obj("a", a={"type": "boolean"}))
    steps = Marker("<c>"), Name(until=("{",)), JsonArguments()
    format = ChatFormat(tool_calls=ToolCalls(starts=("<c>",), call=steps, again=("<c>",)))
    ready = compiled(backend, constrain(format, tools, REQUIRED, parallel=True))
    (both,) = backend.vocab.tokenize('{"', is_fragment=True)
    for name, fits in (("get_all", True), ("get", False)):
        matcher = ready.matcher()
        assert take(backend, matcher, f"<c>{name}")
        assert both in matcher.mask()
        assert matcher.accept(both) is fits
        if not fits:
            assert both not in matcher.mask()
            assert take(backend, matcher, "{}")
        matcher.close()


def test_only_so_many_functions_are_enforced_at_once(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.llama.grammar.matcher.MAX_ENFORCED", 1)
    ready = compiled(backend, constrain(families.HERMES, many(), REQUIRED, parallel=True))
    call = '<tool_call>{{"name": "other_{}", "arguments": {{"x": 1}}}}</tool_call>'
    matcher = ready.matcher()
    assert take(backend, matcher, "".join(call.format(i) for i in range(3)))
    assert matcher._growth._enforced == {2}
    assert not take(backend, matcher, call.format(3).replace("1}", "true}"))
    matcher.close()


def test_begin_takes_a_name(backend: LlamaBackend) -> None:
    ready = compiled(backend, constrain(families.QWEN3_CODER, many(), AUTO, parallel=True))
    matcher = ready.matcher()
    assert matcher.begin(b"other_9>\n<parameter=x>\n")
    assert not take(backend, matcher, "text")
    assert not matcher.begin(b"unknown>")
    matcher.close()


def test_an_output_of_the_model(backend: LlamaBackend) -> None:
    tools = many()
    for format in (families.HERMES, families.GEMMA4):
        grammar = constrain(format, tools, REQUIRED, parallel=False)
        text, reason = generate(backend, grammar)
        if reason is FinishReason.EOS:
            (call,) = read(text, format, tools, "").tool_calls
            assert isinstance(json.loads(call.arguments)["x"], int)


def test_a_strict_function_among_many(backend: LlamaBackend) -> None:
    schema = obj("a", a={"type": "string", "maxLength": 2})
    tools = [*many(), *strict(tool("get", {**schema, "additionalProperties": False}))]
    ready = compiled(backend, constrain(families.HERMES, tools, REQUIRED, parallel=True))
    matcher = ready.matcher()
    assert not take(backend, matcher, '<tool_call>{"name": "get", "arguments": {"a": "abc')
    matcher.close()
    wrong = [*many(), *strict(tool("get", obj(a={"type": "array", "uniqueItems": True})))]
    with pytest.raises(InvalidRequestError, match="uniqueItems") as caught:
        compiled(backend, constrain(families.HERMES, wrong, AUTO, parallel=True))
    assert caught.value.param == "tools[60].function.parameters"


def test_what_would_hold_up_an_output_is_not_enforced(backend: LlamaBackend) -> None:
    costly = obj("a", a={"type": "string", "pattern": "^a+$"}, b={"type": "integer"})
    long = obj("a", a={"enum": ["x" * 50 + str(i) for i in range(3000)]})
    tools = many(costly=costly, long=long)
    ready = compiled(backend, constrain(families.HERMES, tools, REQUIRED, parallel=True))
    with capture_logs() as logs:
        for name, arguments in (("costly", '{"a": "b", "b": 5}'), ("long", '{"z": 1}')):
            matcher = ready.matcher()
            text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
            assert take(backend, matcher, text)
            matcher.close()
    assert [(entry["tool"], entry["relaxed"]) for entry in logs] == [
        ("costly", "some arguments"),
        ("long", "all arguments"),
    ]
