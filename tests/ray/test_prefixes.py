"""Requests that begin alike have hints that begin alike, whatever API they are of."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trioserve.ray.prefixes import LONGEST, MOST, SHORTEST, RoutingHint, hint_of

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are terse. " * 100}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(*texts: str, **others: Any) -> RoutingHint:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    return hint_of(CHAT, {"messages": [SYSTEM, *turns], **others})


def shared(one: RoutingHint, other: RoutingHint) -> int:
    """How many blocks they have in common; none of the others is in both."""
    n = sum(a == b for a, b in zip(one.blocks, other.blocks, strict=False))
    assert one.blocks[:n] == other.blocks[:n]
    assert not set(one.blocks[n:]) & set(other.blocks[n:])
    return n


def test_a_turn_begins_with_what_the_turn_before_had() -> None:
    first = chat("Who are you?")
    second = chat("Who are you?", "I am a model.", "Whose?")
    assert shared(first, second) == len(first.blocks)
    assert len(second.blocks) == len(first.blocks) + 2


def test_conversations_have_their_system_prompt_in_common() -> None:
    one, other = chat("Who are you?"), chat("What is this?")
    assert shared(one, other) == len(one.blocks) - 1
    lengths = [length for _, length in one.blocks]
    assert lengths == sorted(set(lengths))
    assert lengths[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]


def test_other_tools_and_adapters_have_nothing_in_common() -> None:
    plain = chat("Hello")
    for other in (
        chat("Hello", tools=TOOLS),
        chat("Hello", lora=[{"id": 0, "scale": 1.0}]),
        chat("Hello", cache_salt="of my own"),
    ):
        assert shared(plain, other) == 0
    assert chat("Hello", tools=TOOLS) == chat("Hello", tools=TOOLS, temperature=0.2, stream=True)


def test_it_does_not_matter_how_a_client_writes_the_same_text() -> None:
    part = {"type": "text", "text": "Who are you?"}
    marked = {**part, "cache_control": {"type": "ephemeral"}}
    expected = hint_of(CHAT, {"messages": [{"role": "user", "content": "Who are you?"}]})
    for content in ([part], [marked]):
        assert hint_of(CHAT, {"messages": [{"content": content, "role": "user"}]}) == expected


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/messages", {"system": "Be terse.", "messages": [{"role": "user", "content": "?"}]}),
        ("/v1/responses", {"instructions": "Be terse.", "input": "Why?"}),
        ("/v1/responses", {"input": [{"role": "user", "content": "Why?"}]}),
        ("/v1/completions?x=1", {"prompt": "Once upon"}),
        ("/completion", {"prompt": [1, 2, 3]}),
        ("/api/generate", {"system": "Be terse.", "prompt": "Why?"}),
        ("/infill", {"input_prefix": "def f(", "input_suffix": ")", "input_extra": []}),
    ],
)
def test_every_api_has_a_beginning(route: str, body: dict[str, Any]) -> None:
    hint = hint_of(route, body)
    assert hint.blocks
    assert hint == hint_of(route, dict(reversed(body.items())))
    longer = {name: value for name, value in body.items() if name not in ("prompt", "input_prefix")}
    assert hint_of(route, {**longer, "lora": [{"id": 1}]}).blocks[0] != hint.blocks[0]


@pytest.mark.parametrize("body", [None, [], "text", {}, {"messages": None}, {"prompt": {}}])
def test_a_body_without_a_prompt_has_no_beginning(body: object) -> None:
    assert hint_of(CHAT, body, "chat-7") == RoutingHint((), "chat-7")


def test_nothing_is_cached_of_embeddings() -> None:
    assert hint_of("/v1/embeddings", {"input": "a text"}) == RoutingHint()
    assert hint_of("/v1/rerank/", {"query": "a", "documents": ["b"]}) == RoutingHint()


def test_an_image_is_known_by_its_bytes_and_has_some_weight() -> None:
    def about(data: str) -> RoutingHint:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return hint_of(CHAT, {"messages": [{"role": "user", "content": [image]}]})

    large = "A" * 5_000_000
    assert about(large) == about(large)
    assert not set(about(large).blocks) & set(about(large + "A").blocks)
    assert not set(about(large).blocks) & set(about(large[:-1] + "B").blocks)
    assert 1000 < about("A").blocks[-1][1] == about(large).blocks[-1][1] < 4000


def test_a_long_prompt_has_no_more_than_its_beginning_looked_at() -> None:
    text = "x" * LONGEST
    one, other = chat(text + "one"), chat(text + "other")
    assert one == other
    assert one.blocks[-1][1] == LONGEST
    many = chat(*map(str, range(1000)))
    assert len(many.blocks) == MOST
    assert len(pickle.dumps(many)) < 2000  # it goes to the router and to a replica


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(("messages", "prompt", "system", "tools", "input")), JSON, JSON)
def test_no_body_is_too_odd(name: str, value: object, other: object) -> None:
    hint = hint_of(CHAT, {name: value, "lora": other})
    assert all(0 <= block < 1 << 64 and 0 < length <= LONGEST for block, length in hint.blocks)


def test_a_body_that_is_nested_deeply_is_no_problem() -> None:
    value: object = "deep"
    for _ in range(5000):
        value = [value]
    assert hint_of(CHAT, {"messages": [{"content": value}]}).blocks
