"""Compiling: regular expressions, what is no grammar, and what is compiled only once."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.grammar_bench import (
    GREEDY,
    SCHEMAS,
    generate,
    refusal,
    schema,
)
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ServerClosingError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar import compiler
from trioserve.types import FinishReason, GenerationParams, Grammar


@pytest.mark.system
def test_a_regular_expression(backend: LlamaBackend) -> None:
    text, reason = generate(backend, Grammar("regex", "[a-f/]{3}x?"), sampling=GREEDY)
    assert reason is FinishReason.EOS and re.fullmatch("[a-f/]{3}x?", text)
    assert "look-around" in refusal(backend, Grammar("regex", "(?=a)b"))
    assert "65536" in refusal(backend, Grammar("regex", "a" * 70000))


@pytest.mark.parametrize(
    ("arguments", "param"),
    [(("xml", ""), "kind"), (("gbnf", 5), "grammar"), (("gbnf", "\ud800"), "grammar")],
)
def test_a_message_that_makes_no_sense(arguments: tuple[Any, ...], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Grammar(*arguments)
    assert caught.value.param == param


def test_options_take_grammars_only() -> None:
    with pytest.raises(InvalidRequestError):
        GenerationParams(grammar="root ::= x")  # type: ignore[arg-type]
    grammar = Grammar("regex", "a", param="json_schema")
    assert GenerationParams(grammar=grammar).grammar is grammar
    assert grammar == Grammar("regex", "a") and hash(grammar) == hash(Grammar("regex", "a"))


# -- compiling


def test_what_was_compiled_is_remembered(backend: LlamaBackend) -> None:
    first = backend.compile(Grammar("regex", "remember"))
    assert backend.compile(Grammar("regex", "remember", param="json_schema")) is first
    for i in range(70):
        backend.compile(Grammar("regex", f"n{i}"))
    assert backend.compile(Grammar("regex", "remember")) is not first


def test_what_was_compiled_for_one_owner_is_not_found_by_another(backend: LlamaBackend) -> None:
    grammar = Grammar("regex", "whose")
    mine = backend.compile(grammar, "me")
    assert backend.compile(grammar, "you") is not mine
    assert backend.compile(grammar, "me") is mine


@pytest.mark.system
def test_what_is_remembered_is_bounded_in_bytes(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MAX_CACHED_BYTES", 2_000_000)
    small = backend.compile(Grammar("regex", "small"))
    assert backend.compile(Grammar("regex", "small")) is small
    for letter in "ab":
        large = Grammar("regex", letter * 25_000)
        assert backend.compile(large) is backend.compile(large)
    assert backend.compile(Grammar("regex", "small")) is not small
    too_large = Grammar("regex", "c" * 50_000)
    assert backend.compile(too_large) is not backend.compile(too_large)


@pytest.mark.system
def test_compiling_in_many_threads_at_once(backend: LlamaBackend) -> None:
    grammars = [schema(SCHEMAS[name]) for name in SCHEMAS] * 3
    with ThreadPoolExecutor(4) as pool:
        assert len({id(compiled) for compiled in pool.map(backend.compile, grammars)}) == len(
            SCHEMAS
        )


def test_a_closed_model_compiles_nothing() -> None:
    before = set(threading.enumerate())
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        compiled = backend.compile(Grammar("regex", "abc"))
        sampler = backend.sampler(GREEDY, (), compiled)
        sampler._matcher.accept(compiled.first.ids[0])
    with pytest.raises(ServerClosingError):
        backend.compile(Grammar("regex", "other"))
    assert set(threading.enumerate()) <= before
