"""Requests that begin alike have hints that begin alike, whatever API they are of."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.ray_replicas import hint_of
from trioserve.ray.prefix_affinity import LONGEST, MOST, ROOM, SHORTEST, PrefixAffinity, RoutingHint

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are terse. " * 100}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(*texts: str, **others: Any) -> RoutingHint:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    return hint_of(CHAT, {"messages": [SYSTEM, *turns], **others})


def shared(one: RoutingHint, other: RoutingHint) -> int:
    """The number of first blocks that are equal; the later blocks all differ."""
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


REPLICAS = [f"replica-{i}" for i in range(40)]


def blocks(*names: str, length: int = 1000) -> list[tuple[int, int]]:
    """A prompt of parts: each beginning is known by all the parts that it has."""
    return [
        (random.Random("|".join(names[: i + 1])).getrandbits(64), length * (i + 1))
        for i in range(len(names))
    ]


def router(replicas: list[str] = REPLICAS, seed: int = 1) -> PrefixAffinity:
    homes = PrefixAffinity(random.Random(seed))
    homes.update(replicas)
    return homes


def idle(replica: str) -> float:
    return 0.0


def test_all_routers_agree_where_a_beginning_is_at_home() -> None:
    one, other = router(seed=1), router(list(reversed(REPLICAS)), seed=2)
    firsts = [
        {each.rank(blocks(f"prompt {i}", "question"), idle)[0] for each in (one, other)}
        for i in range(50)
    ]
    assert all(len(found) == 1 for found in firsts)
    assert len(set.union(*firsts)) > 20


def test_what_begins_alike_goes_to_one_replica() -> None:
    homes = router()
    for i in range(300):  # so that none is common
        homes.rank(blocks(f"other {i}"), idle)
    found = {homes.rank(blocks("prompt", f"question {i}"), idle)[0] for i in range(3)}
    assert len(found) == 1


def test_a_beginning_that_is_common_has_homes_by_its_share_and_conversations_stay() -> None:
    homes, others = router(), router(seed=2)

    def ask(each: PrefixAffinity, prompt: str, conversation: int) -> str:
        return each.rank(blocks(prompt, f"conversation {conversation}"), idle)[0]

    for i in range(2000):  # a twentieth of all: two of 40 replicas would do
        for each in (homes, others):
            ask(each, "common" if i % 20 == 0 else f"rare {i}", i)
    used = [(ask(homes, "common", i), ask(others, "common", i)) for i in range(40)]
    assert 2 < len({one for one, _ in used}) <= 3 * ROOM
    assert all(one == other for one, other in used)
    # Meanwhile it has become more common, and has more homes: most stay where they were.
    assert sum(ask(homes, "common", i) == used[i][0] for i in range(40)) >= 24


def test_what_all_requests_have_is_everywhere() -> None:
    homes = router()
    found = Counter(homes.rank(blocks("all", f"own {i}"), idle)[0] for i in range(2000))
    assert len(found) == len(REPLICAS)
    assert max(found.values()) < 4 * 2000 / len(REPLICAS)
    # The same prompt again and again has no home, since every replica has it.
    repeated = Counter(homes.rank(blocks("all", "the same"), idle)[0] for _ in range(4000))
    assert len(repeated) == len(REPLICAS)


@pytest.mark.parametrize(
    ("length", "load", "stays"),
    [
        (8000, 0.9, True),  # the slots are almost taken: better than to prefill all of it
        (8000, 1.5, False),  # half a turn of waiting: 10,000 characters
        (40_000, 1.5, True),
        (40_000, 5.0, False),
        (500, 0.9, False),  # there is not much to lose
        (500, 0.1, True),
    ],
)
def test_a_request_leaves_its_home_when_waiting_costs_more_than_the_prompt(
    length: int, load: float, stays: bool
) -> None:
    homes = router()
    prompt = blocks("prompt", length=length)
    home = homes.rank(prompt, idle)[0]
    ranks = homes.rank(prompt, lambda replica: load if replica == home else 0.0)
    assert (ranks[0] == home) is stays
    assert 2 <= len(ranks) == len(set(ranks)) <= 6


def test_without_a_beginning_the_less_full_of_two_is_chosen() -> None:
    homes = router(["a", "b"])
    assert homes.rank((), {"a": 0.5, "b": 0.25}.__getitem__) == ["b", "a"]
    assert homes.rank((), {"a": 0.5, "b": 0.75}.__getitem__) == ["a", "b"]
    used = Counter(router().rank((), idle)[0] for _ in range(3))
    assert used


def test_few_move_when_replicas_come_and_go() -> None:
    homes = router()
    prompts = [blocks(f"prompt {i}") for i in range(400)]
    before = [homes.rank(prompt, idle)[0] for prompt in prompts]
    stay = REPLICAS[4:]
    homes.update([*stay, "new 1", "new 2"])
    after = [homes.rank(prompt, idle)[0] for prompt in prompts]
    moved = sum(a != b for a, b in zip(before, after, strict=True) if a in stay)
    assert moved < 0.15 * len(prompts)
    assert set(after) <= {*stay, "new 1", "new 2"}
    assert {"new 1", "new 2"} <= set(after)


def test_a_key_has_one_replica_however_full() -> None:
    homes = router()
    assert homes.of_key("chat-7") == router(seed=3).of_key("chat-7")
    assert len({homes.of_key(f"chat-{i}") for i in range(200)}) > 30


def test_without_replicas_there_is_no_choice() -> None:
    homes = router([])
    assert homes.rank(blocks("prompt"), idle) == []
    assert homes.of_key("chat-7") is None


def test_one_replica_has_everything() -> None:
    homes = router(["only"])
    assert homes.rank(blocks("a", "b"), lambda _: 99.0) == ["only"]
    assert homes.of_key("x") == "only"


def test_what_is_rare_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.ray.prefix_affinity.WINDOW", 500)
    homes = router()
    for i in range(1600):
        homes.rank(blocks(f"prompt {i}"), idle)
    assert len(homes._counts) <= 500
