"""Context management of Anthropic's API: compaction, and what is cleared."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.anthropic_api import WEATHER
from tests.support.clients import named_events_in, use_anthropic
from tests.support.compacted import Model, serve
from tests.support.scripts import answering
from trioserve.api.anthropic.context import CLEARED
from trioserve.chat.compaction import PREFACE, TASK

SUMMARIZE = {"compaction": {"type": "summarize"}}


def said(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": content[0] if isinstance(content[0], str) else [*content]}


def use(n: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{n}", "name": "weather", "input": {"city": f"C{n}"}}


def result(n: int, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{n}", "content": text}


def talk(n: int, size: int = 300) -> list[dict[str, Any]]:
    turns = [said("user", "Mind fact-one.")]
    for i in range(n):
        turns += [said("assistant", f"a{i} " + "x" * size), said("user", f"u{i} " + "y" * size)]
    return turns


def edit(kind: str, at: int, **fields: Any) -> dict[str, Any]:
    trigger = {"type": "input_tokens", "value": at}
    return {"context_management": {"edits": [{"type": kind, "trigger": trigger, **fields}]}}


def compact_at(n: int, **fields: Any) -> dict[str, Any]:
    return edit("compact_20260112", n, **fields)


async def post(client: httpx.AsyncClient, path: str = "", **body: Any) -> dict[str, Any]:
    answer = await client.post(f"/v1/messages{path}", json={"max_tokens": 99, **body})
    assert answer.status_code == 200, answer.text
    given: dict[str, Any] = answer.json()
    return given


async def test_a_conversation_is_summed_up_and_goes_on_elsewhere() -> None:
    model = Model()
    turns = [
        said("user", "Mind fact-one."),
        said("assistant", use(1)),
        said("user", result(1, "fact-two")),
        said("assistant", use(2)),
    ]
    async with serve(model) as client:
        body = {"messages": turns, "tools": [WEATHER], "system": "Be brief.", **SUMMARIZE}
        message = await post(client, **body)
        text = (await client.post("/v1/messages", json={**body, "stream": True})).text
    assert message["stop_reason"] == "compaction"
    (block,) = message["content"]
    assert block["content"] == "Summary: fact-one, fact-two"
    begin, _, start, delta, _, end, _ = named_events_in(text)
    assert start["content_block"] == {**block, "content": None, "encrypted_content": None}
    assert delta["delta"] == {**block, "type": "compaction_delta"}
    assert end["delta"]["stop_reason"] == "compaction"
    (iteration,) = message["usage"]["iterations"]
    assert iteration["type"] == "compaction"
    assert iteration["input_tokens"] == len(model.prompts[0])
    assert message["usage"]["input_tokens"] == begin["message"]["usage"]["input_tokens"] == 0

    async with serve(other := Model()) as client:
        rest = [said("assistant", block), said("user", result(2, "rain"), part("Continue."))]
        message = await post(client, messages=rest, tools=[WEATHER], system="Be brief.")
        # A runner sends nothing else; what a client without the second field sends is read, too.
        await post(client, messages=[said("assistant", {**block, "encrypted_content": None})])
        foreign = {**block, "encrypted_content": "gAAA"}
        await post(client, messages=[said("user", foreign, part("Continue."))])
    assert message["content"][0]["text"] == "Well."
    first, second, third = other.prompts
    parts = ("Be brief.", PREFACE.strip(), "Summary: fact-one", "C2", "rain", "Continue.")
    places = [first.index(one) for one in parts]
    assert places == sorted(places)
    assert "Summary: fact-one" in second and second.endswith("assistant\n")
    assert "Summary: fact-one" in third and "Continue." in third


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_a_conversation_is_compacted_and_answered() -> None:
    model = Model()
    async with serve(model) as client:
        body = {"messages": talk(6), **compact_at(3000, instructions="Mind the sea.")}
        assert "iterations" not in (await post(client, **body | {"messages": talk(2)}))["usage"]
        message = await post(client, **body)
        events = named_events_in(
            (await client.post("/v1/messages", json={**body, "stream": True})).text
        )
        block, text = message["content"]
        assert (block["type"], text["text"]) == ("compaction", "Well.")
        assert message["context_management"] == {"applied_edits": []}
        assert events[-2]["context_management"] == {"applied_edits": []}
        assert TASK + "\n\nMind the sea." in model.prompts[1]
        compaction, answer = message["usage"]["iterations"]
        assert answer["input_tokens"] + answer["cache_read_input_tokens"] == len(model.prompts[2])
        assert compaction["type"] == "compaction"
        # The client sends the earlier messages again; the prompt leaves them out.
        more = [*talk(6), said("assistant", *message["content"]), said("user", "Continue.")]
        await post(client, **body | {"messages": more})
        assert model.prompts[-1].startswith(model.prompts[2])
        assert "u5 " in model.prompts[-1] and "u0 " not in model.prompts[-1]
        # A pause leaves the answer to the next request.
        n = len(model.prompts)
        paused = compact_at(3000, pause_after_compaction=True)
        message = await post(client, messages=talk(6), **paused)
        assert message["stop_reason"] == "compaction"
        assert len(model.prompts) == n + 1
        message = await post(
            client, messages=[*talk(6), said("assistant", *message["content"])], **paused
        )
        assert [one["type"] for one in message["content"]] == ["text"]


async def test_a_compaction_that_failed() -> None:
    model = Model(summary=" ")
    async with serve(model) as client:
        message = await post(client, messages=talk(1), **SUMMARIZE)
        (block,) = message["content"]
        assert (block["content"], message["stop_reason"]) == (None, "compaction")
        message = await post(client, messages=talk(6), **compact_at(3000))
        assert [one["type"] for one in message["content"]] == ["compaction", "text"]
        turns = [*talk(1), said("assistant", *message["content"]), said("user", "Continue.")]
        await post(client, messages=turns)
        assert all(one in model.prompts[-1] for one in ("fact-one", "u0 ", "Well.", "Continue."))


async def test_results_are_cleared() -> None:
    model = Model()
    turns = [said("user", "Hi")]
    for i in range(5):
        turns += [said("assistant", use(i)), said("user", result(i, f"r{i} " + "x" * 200))]
    keep = {"type": "tool_uses", "value": 2}
    async with serve(model) as client:
        body = {"messages": turns, "tools": [WEATHER]}
        message = await post(client, **body, **edit("clear_tool_uses_20250919", 1000, keep=keep))
        (applied,) = message["context_management"]["applied_edits"]
        assert applied["type"] == "clear_tool_uses_20250919"
        assert applied["cleared_tool_uses"] == 3
        prompt = model.prompts[-1]
        assert prompt.count(CLEARED) == 3 and '"C0"' in prompt
        assert "r3 " in prompt and "r4 " in prompt and "r2 " not in prompt
        counted = {name: body[name] for name in body}
        fields = edit("clear_tool_uses_20250919", 1000, keep=keep)
        answer = await client.post("/v1/messages/count_tokens", json={**counted, **fields})
        n_left, before = answer.json()["input_tokens"], answer.json()["context_management"]
        assert n_left == len(prompt)
        assert before["original_input_tokens"] - n_left == applied["cleared_input_tokens"]
        for more in (
            {"exclude_tools": ["weather"]},
            {"clear_at_least": {"type": "input_tokens", "value": 700}},
            {"trigger": {"type": "tool_uses", "value": 5}},
        ):
            fields = edit("clear_tool_uses_20250919", 1000, keep=keep)
            fields["context_management"]["edits"][0] |= more
            message = await post(client, **body, **fields)
            assert message["context_management"] == {"applied_edits": []}
        fields = edit("clear_tool_uses_20250919", 1000, keep=keep, clear_tool_inputs=True)
        await post(client, **body, **fields)
        assert '"C0"' not in model.prompts[-1] and '"C4"' in model.prompts[-1]


async def test_thinking_is_cleared() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    model = Model()
    turns: list[Any] = [said("user", "Hi")]
    for i in range(3):
        thought = {"type": "thinking", "thinking": f"hm{i}", "signature": "s"}
        turns += [said("assistant", thought, part("So.")), said("user", "And?")]

    async def kept(client: httpx.AsyncClient, **fields: Any) -> list[int]:
        edits = [{"type": "clear_thinking_20251015", **fields}]
        await post(client, messages=turns, context_management={"edits": edits})
        return [i for i in range(3) if f"hm{i}" in model.prompts[-1]]

    async with serve(model, chat_template=template) as client:
        assert await kept(client) == [2]
        assert await kept(client, keep="all") == await kept(client, keep={"type": "all"})
        assert await kept(client, keep={"type": "all"}) == [0, 1, 2]
        assert await kept(client, keep={"type": "thinking_turns", "value": 2}) == [1, 2]


def compaction(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [said("user", {"type": "compaction", "content": content, **fields})]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**SUMMARIZE, **compact_at(1)}, "compaction"),
        ({"compaction": {"type": "other"}}, "compaction.type"),
        (edit("other_1", 1), "context_management.edits[0].type"),
        (compact_at(-1), "context_management.edits[0].trigger.value"),
        (
            {"context_management": {"edits": [{"type": "compact_1"}] * 2}},
            "context_management.edits[1].type",
        ),
        (compaction(""), "messages[0].content[0].content"),
        (
            compaction("x", encrypted_content='{"type": "trioserve.compaction"}'),
            "messages[0].content[0].encrypted_content",
        ),
    ],
)
async def test_a_refusal_names_the_parameter(fields: dict[str, Any], param: str) -> None:
    async with serve(Model()) as client:
        answer = await client.post(
            "/v1/messages", json={"max_tokens": 9, "messages": talk(1), **fields}
        )
    assert answer.status_code == 400
    assert f"'{param}'" in json.loads(answer.text)["error"]["message"]


async def test_anthropic_s_client() -> None:
    model = Model()

    def ask(client: anthropic.Anthropic) -> None:
        with client.beta.messages.stream(
            model="any", max_tokens=99, messages=talk(6), **compact_at(3000)
        ) as stream:
            message = stream.get_final_message()
        block, text = message.content
        assert block.type == "compaction" and text.type == "text"
        assert block.content == "Summary: fact-one"
        assert message.context_management is not None
        whole = client.beta.messages.create(
            model="any",
            max_tokens=99,
            messages=[*talk(6), message.to_param(), said("user", "Continue.")],
            **compact_at(3000),
        )
        assert [one.type for one in whole.content] == ["text"]

    await use_anthropic(answering(model, n_ctx=8192), ask)
