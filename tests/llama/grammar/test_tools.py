"""Grammars of many tools: the arguments of each are enforced once its name is known."""

from __future__ import annotations

import pytest

from tests.support.message_writers import WRITERS
from tests.support.tool_grammars import (
    REQUIRED,
    TOOLS,
    check_calls,
    read,
    split,
    tail_of,
    texts,
)
from trioserve.chat.grammar.answer import constrain
from trioserve.llama import LlamaBackend
from trioserve.llama.grammar import tools


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch, backend: LlamaBackend) -> LlamaBackend:
    """Every grammar of tools grows."""
    monkeypatch.setattr(tools, "_MAX_AT_ONCE", 0)
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
