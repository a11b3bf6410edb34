"""Chats with tools that the server runs, on the wire. The model is a script."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
from structlog.testing import capture_logs

from tests.support.clients import client_of, events_in
from tests.support.http_server import chunks_of, connected, post, serving_script, slots_in_use
from tests.support.run_stream import (
    CHATS,
    ERASE,
    RUN,
    STREAM,
    WEATHER,
    Reading,
    asking,
    call,
    reading,
    weather,
)
from tests.support.scripts import BASE, HI, answering, endless, noting
from tests.support.served_tools import client_of_tools
from tests.support.waiting import patiently
from trioserve.api.base import generation
from trioserve.tools.functions import tool_of
from trioserve.tools.registry import select
from trioserve.tools.tool import ToolCallContext

PARIS = call("weather", city="Paris")


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    answer = await client.post(CHATS, json={**STREAM, **fields})
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


def told(chunks: list[Any]) -> list[Any]:
    """The events of the run in chunks."""
    return [chunk["trioserve_event"] for chunk in chunks if "trioserve_event" in chunk]


def text(chunks: list[Any], field: str = "content") -> str:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


# -- what comes back


async def test_a_stream_tells_all_that_happens() -> None:
    backend = asking(PARIS, before="<think>\nLook.\n</think>\n\nLet me see. ")
    async with client_of_tools(backend, WEATHER) as (client, _):
        chunks = await streamed(client)
    events = told(chunks)
    ids = [event.pop("id") for event in events]
    assert ids == sorted(set(ids))
    call_id = events[1]["call_id"]
    assert events[3].pop("seconds") >= 0
    messages = events[-1].pop("messages")
    made = {"tool": "weather", "kind": "function", "display_name": "weather", "writes": False}
    result = {"content": "sunny in Paris", "is_error": False, "diff": None, "stopped": False}
    arguments = '{"city": "Paris"}'
    assert events == [
        {"type": "step", "step": 1},
        {"type": "call", "call_id": call_id, "step": 1, **made, "arguments": arguments},
        {"type": "started", "call_id": call_id},
        {"type": "result", "call_id": call_id, **result},
        {"type": "step", "step": 2},
        {"type": "end", "reason": "answer", "steps": 2},
    ]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert messages[0]["reasoning_content"] == "Look."
    assert messages[0]["tool_calls"][0]["id"] == messages[1]["tool_call_id"] == call_id
    assert text(chunks) == "Let me see. It is sunny."
    assert text(chunks, "reasoning_content") == "Look."
    assert not any("tool_calls" in each["choices"][0]["delta"] for each in chunks)
    assert [each["choices"][0]["finish_reason"] for each in chunks][-2:] == [None, "stop"]
    assert chunks[-1]["timings"]["predicted_n"] > len("It is sunny.")


async def test_a_whole_answer_has_the_messages_beside() -> None:
    async with client_of_tools(asking(PARIS), WEATHER) as (client, _):
        answer = (await client.post(CHATS, json={**RUN, "logprobs": True})).json()
        messages = [*HI, *answer["trioserve_messages"], {"role": "user", "content": "And now?"}]
        again = (await client.post(CHATS, json={**RUN, "messages": messages})).json()
        *_, end = await streamed(client, stream_options={"include_usage": True})
    tokens = [each["token"] for each in answer["choices"][0].pop("logprobs")["content"]]
    assert "".join(tokens) == "It is sunny."  # those of the last answer
    message = {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert answer["choices"] == [{"index": 0, "finish_reason": "stop", "message": message}]
    first, result, last = answer["trioserve_messages"]
    paris = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert first["tool_calls"][0]["function"] == paris
    assert result["content"] == "sunny in Paris"
    assert last["content"] == "It is sunny."
    usage = answer["usage"]
    assert usage["completion_tokens"] == answer["timings"]["predicted_n"] > len(PARIS)
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    # Messages that are sent back hit the cache.
    known = usage["total_tokens"] - usage["completion_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= known
    # A stream tells the same usage, of all steps.
    assert end["choices"] == []
    for each in (usage, end["usage"]):
        del each["prompt_tokens_details"]  # the later one finds a cache
    assert end["usage"] == usage


async def test_progress_timings_and_verbose_output_of_a_run() -> None:
    fields = {"return_progress": True, "timings_per_token": True, "verbose": True}
    async with client_of_tools(asking(PARIS), WEATHER) as (client, _):
        chunks = await streamed(client, **fields)
        whole = (await client.post(CHATS, json={**RUN, "verbose": True})).json()
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    totals = [each["total"] for each in progress if each["processed"] == each["total"]]
    assert len(set(totals)) == 2  # one for each step
    counts = [
        chunk["timings"]["predicted_n"]
        for chunk in chunks[:-1]
        if "timings" in chunk and chunk["choices"][0]["delta"].get("content")
    ]
    assert counts[-1] - len("It is sunny.") in (0, 1)  # the end of the answer is a token, too
    for verbose in (chunks[-1]["__verbose"], whole["__verbose"]):
        assert "<tool_response>\nsunny in Paris" in verbose["prompt"]
    assert whole["__verbose"]["content"].startswith("It is sunny.")


# -- what may be asked for

TOOLS = [{"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}]
FIELD = "trioserve_run_tools"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({FIELD: 1}, FIELD, "true, false or an object"),
    ({FIELD: {"tools": "weather"}}, f"{FIELD}.tools", "list of strings"),
    ({FIELD: {"tools": ["nothing"]}}, f"{FIELD}.tools", "'nothing'"),
    ({FIELD: {"max_steps": 0}}, f"{FIELD}.max_steps", "at least 1"),
    ({FIELD: {"max_steps": 17}}, f"{FIELD}.max_steps", "--tool-max-steps"),
    ({FIELD: {"approval": "maybe"}}, f"{FIELD}.approval", '"none"'),
    ({FIELD: {"approval": "ask"}}, f"{FIELD}.approval", "'stream'"),
    ({FIELD: {"cwd": 1}}, f"{FIELD}.cwd", "a string"),
    ({FIELD: {"aproval": "all"}}, f"{FIELD}.aproval", "there are tools, max_steps"),
    ({"n": 2}, "n", "must be 1"),
    ({"parse_tool_calls": False}, "parse_tool_calls", "needs"),
    ({"tools": [{**TOOLS[0], "function": {"name": "weather"}}]}, "tools", "'weather'"),
    ({"messages": [*HI, {"role": "assistant", "content": "Well"}]}, "messages", "is continued"),
]


async def test_invalid_options_of_a_run_are_refused() -> None:
    async with client_of_tools(asking(PARIS), WEATHER) as (client, _):
        for fields, param, message in REFUSED:
            answer = await client.post(CHATS, json={**RUN, **fields})
            assert answer.status_code == 400, fields
            error = answer.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error")
            assert message in error["message"]


async def test_without_tools_and_on_other_routes_none_are_run() -> None:
    async with client_of(answering("Hi")) as client:
        answer = await client.post(CHATS, json=RUN)
        assert answer.status_code == 400
        assert "--mcp-servers-config" in answer.json()["error"]["message"]
        for nothing in (False, None):
            plain = await client.post(CHATS, json={**RUN, FIELD: nothing})
            assert "trioserve_messages" not in plain.json()
        others = ("/v1/completions", "/completion", "/v1/messages", "/api/chat", "/api/generate")
        for path in others:
            answer = await client.post(path, json={**BASE, FIELD: True})
            assert answer.status_code == 400
            assert FIELD in answer.text
            assert (await client.post(path, json={**BASE, FIELD: False})).status_code != 400


async def test_the_model_is_offered_the_chosen_tools() -> None:
    backend, prompts = noting("Hello")
    async with client_of_tools(backend, WEATHER, ERASE) as (client, _):
        for chosen, offered in (
            (["weather"], {"weather", "mine"}),
            (["w*"], {"weather", "mine"}),
            (["*"], {"weather", "erase", "mine"}),
            ([], {"mine"}),
        ):
            body = {**RUN, FIELD: {"tools": chosen}, "tools": TOOLS}
            answer = await client.post(CHATS, json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello"
            names = ("weather", "erase", "mine")
            assert {name for name in names if f'"{name}"' in prompts[-1]} == offered


async def test_tools_count_in_the_prompt() -> None:
    async with client_of_tools(asking(PARIS), WEATHER, ERASE) as (client, _):
        whole = await client.post(CHATS, json={**RUN, FIELD: {"max_steps": 1}})
        counts = [
            (await client.post(f"{CHATS}/input_tokens", json={**RUN, FIELD: run})).json()
            for run in (True, {"tools": ["weather"]}, False)
        ]
    n_all, n_weather, n_none = (count["input_tokens"] for count in counts)
    assert n_all == whole.json()["usage"]["prompt_tokens"]
    assert n_all > n_weather > n_none


async def test_max_steps_ends_the_answer() -> None:
    async with client_of_tools(answering(PARIS), WEATHER) as (client, _):
        chunks = await streamed(client, trioserve_run_tools={"max_steps": 2})
        whole = (await client.post(CHATS, json={**RUN, FIELD: {"max_steps": 1}})).json()
    *_, end = told(chunks)
    assert (end["reason"], end["steps"], len(end["messages"])) == ("max_steps", 2, 4)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert [message["role"] for message in whole["trioserve_messages"]] == ["assistant", "tool"]


# -- tools of the client's own


async def test_the_client_gets_calls_of_its_own_tools_alone() -> None:
    backend = asking(PARIS, call("mine", x=1), before="<think>\nBoth.\n</think>\n\n")
    async with client_of_tools(backend, WEATHER) as (client, _):
        chunks = await streamed(client, tools=TOOLS)
        whole = (await client.post(CHATS, json={**RUN, "tools": TOOLS})).json()
    deltas = [
        part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert {part["index"] for part in deltas} == {0}
    assert deltas[0]["function"]["name"] == "mine"
    assert "".join(part["function"]["arguments"] for part in deltas) == '{"x": 1}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    *_, end = told(chunks)
    assert end["reason"] == "client_tools"
    assert [message["role"] for message in end["messages"]] == ["assistant", "tool"]
    assert len(end["messages"][0]["tool_calls"]) == 2
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "mine", "arguments": '{"x": 1}'}


# -- calls that write


async def test_a_call_that_writes_waits_for_a_person() -> None:
    decisions = [{"approve": True}, {"approve": False, "reason": "keep it"}]
    results = []
    async with client_of_tools(asking(call("erase", path="a")), ERASE) as (client, _):
        for decision in decisions:
            async with reading(str(client.base_url)) as events:
                id_, needed = await events.until("approval")
                assert needed["preview"] is None
                path, call_id = f"{CHATS}/{id_}", needed["call_id"]
                approved = {"call_id": call_id, **decision}
                answer = await client.post(f"{path}/approve", json=approved)
                assert answer.json() == {"success": True}
                again = await client.post(f"{path}/approve", json=approved)
                assert (again.status_code, again.json()["error"]["code"]) == (
                    409,
                    "tool_call_decided",
                )
                _, said = await events.until("approved" if decision["approve"] else "denied")
                assert said["reason"] == decision.get("reason", "")
                results.append((await events.until("result"))[1])
    assert [result["is_error"] for result in results] == [False, True]
    assert results[0]["content"] == "erased a"
    assert "keep it" in results[1]["content"]


async def test_a_preview_shows_a_long_file_and_its_long_lines_to_the_end(tmp_path: Path) -> None:
    lines = ["x" * 2100 + " the end of a line", *["y" * 40] * 2000, "the end"]
    (tmp_path / "a.txt").write_text("\n".join([*lines, ""]))
    backend = asking(call("write_file", path="a.txt", content="new"))
    config: Any = {"tools": ("write_file",), "tools_dir": (str(tmp_path),)}
    async with serving_script(backend, **config) as (url, _), reading(url) as events:
        _, needed = await events.until("approval")
    shown = needed["preview"].partition(" @@\n")[2].splitlines()
    assert shown[: len(lines)] == [f"-{line}" for line in lines]


async def test_without_a_stream_nothing_is_written_unless_all_may_be() -> None:
    erased = []

    async def note(path: str) -> str:
        """Delete a file."""
        erased.append(path)
        return "done"

    tool = tool_of(note, writes=True)
    async with client_of_tools(asking(call("note", path="a")), tool) as (client, _):
        refused = (await client.post(CHATS, json=RUN)).json()
        assert erased == []
        allowed = (await client.post(CHATS, json={**RUN, FIELD: {"approval": "all"}})).json()
    assert erased == ["a"]
    assert refused["trioserve_messages"][1]["content"] != "done"
    assert allowed["trioserve_messages"][1]["content"] == "done"


KEY = "Authorization: Bearer"


async def test_only_the_key_of_a_chat_may_approve_its_calls() -> None:
    tools = client_of_tools(asking(call("erase", path="a")), ERASE, api_keys=("one", "two"))
    async with tools as (client, _), reading(str(client.base_url), f"{KEY} one") as events:
        id_, needed = await events.until("approval")

        async def act(action: str, body: Any, id_: str = id_, key: str = "one") -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(f"{CHATS}/{id_}/{action}", json=body, headers=headers)

        for action, rest in (("approve", {"approve": True}), ("stop", {})):
            unknown = {"call_id": "call_none", **rest}
            for where in (id_, "chatcmpl-none"):
                assert (await act(action, unknown, where)).status_code == 404
            incomplete = await act(action, rest)
            assert incomplete.status_code == 400
            assert incomplete.json()["error"]["param"] == "call_id"
        decision = {"call_id": needed["call_id"], "approve": True}
        for key, status in (("two", 404), ("three", 401), ("one", 200)):
            assert (await act("approve", decision, key=key)).status_code == status


# -- tools that take their time


@attrs.frozen
class Waiter:
    """A tool that waits until it is cancelled, and notes that it was."""

    started: trio.Event = attrs.field(factory=trio.Event)
    cancelled: trio.Event = attrs.field(factory=trio.Event)

    async def wait(self, context: ToolCallContext) -> str:
        """Wait."""
        context.on_output("waiting")
        self.started.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()


async def test_a_person_stops_a_call_and_the_model_continues() -> None:
    waiter = Waiter()
    backend = asking(call("wait"), PARIS)
    async with (
        client_of_tools(backend, tool_of(waiter.wait), WEATHER) as (client, _),
        reading(str(client.base_url)) as events,
    ):
        id_, output = await events.until("output")
        assert output["text"] == "waiting"
        path, stopped = f"{CHATS}/{id_}/stop", {"call_id": output["call_id"]}
        assert (await client.post(path, json=stopped)).json() == {"success": True}
        result: Any = {"stopped": False}
        while not result["stopped"]:
            _, result = await events.until("result")
        assert result["is_error"]
        assert waiter.cancelled.is_set()
        assert (await client.post(path, json=stopped)).status_code == 409
        _, end = await events.until("end")
        assert end["reason"] == "answer"


async def test_a_client_that_leaves_cancels_the_tool() -> None:
    waiter = Waiter()
    async with client_of_tools(asking(call("wait")), tool_of(waiter.wait)) as (client, service):
        async with reading(str(client.base_url)) as events:
            await events.until("started")
            await waiter.started.wait()
            assert await slots_in_use(service) == 0
        with patiently():
            await waiter.cancelled.wait()
            await service.n_answering.wait_value(0)


async def test_an_answer_is_cancelled_while_a_tool_runs() -> None:
    waiter = Waiter()
    async with (
        client_of_tools(asking(call("wait")), tool_of(waiter.wait)) as (client, _),
        reading(str(client.base_url)) as events,
    ):
        id_, _ = await events.until("output")
        asked = {"id": id_, "action": "cancel"}
        answer = await client.post(f"{CHATS}/control", json=asked)
        assert answer.json() == {"success": True}
        last = await events()
    assert last["error"]["message"] == "The request was cancelled."
    assert waiter.cancelled.is_set()


@pytest.mark.system
@pytest.mark.parametrize("unread_tokens", [16, 2**20])  # the mailbox shows it, or the socket
async def test_a_client_that_stops_reading_is_cut_off(unread_tokens: int) -> None:
    limits = {"unread_tokens": unread_tokens, "stall_timeout": 0.2}
    backend = endless(lambda _: time.sleep(0))
    body = json.dumps(STREAM).encode()
    with capture_logs() as logs:
        async with (
            client_of_tools(backend, WEATHER, **limits) as (client, service),
            connected(str(client.base_url)) as stream,
        ):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await stream.send_all(post(CHATS, body))
            with patiently():
                await service.n_answering.wait_value(1)
                await service.n_answering.wait_value(0)
            assert await slots_in_use(service) == 0
    ends = [line["cancelled"] for line in logs if line["event"] == "request ended"]
    assert ends == ["stalled_reader"]


async def test_a_silent_tool_is_bridged_by_pings() -> None:
    waiter, body = Waiter(), json.dumps({**STREAM, "sse_ping_interval": 0.1}).encode()
    async with (
        client_of_tools(asking(call("wait")), tool_of(waiter.wait)) as (client, _),
        chunks_of(str(client.base_url), post(CHATS, body)) as next_chunk,
    ):
        await waiter.started.wait()
        while await next_chunk() != ":\n\n":
            pass


# -- streams that can be resumed


async def test_a_reader_that_leaves_a_resumable_stream_comes_back() -> None:
    waiter = Waiter()
    async with client_of_tools(asking(call("wait")), tool_of(waiter.wait)) as (client, _):
        async with reading(str(client.base_url), "X-Conversation-Id: a") as events:
            id_, output = await events.until("output")
        assert not waiter.cancelled.is_set()
        again = b"GET /v1/stream?conv_id=a HTTP/1.1\r\nHost: localhost\r\n\r\n"
        async with chunks_of(str(client.base_url), again) as next_chunk:
            events = Reading(next_chunk)
            assert (await events.until("output"))[1] == output
            path = f"{CHATS}/{id_}/stop"
            assert (await client.post(path, json={"call_id": output["call_id"]})).status_code == 200
            await events.until("end")


async def test_a_stream_that_is_deleted_cancels_its_tools() -> None:
    waiter = Waiter()
    async with (
        client_of_tools(asking(call("wait")), tool_of(waiter.wait)) as (client, _),
        reading(str(client.base_url), "X-Conversation-Id: a") as events,
    ):
        await events.until("output")
        await client.delete("/v1/stream", params={"conv_id": "a"})
        with patiently():
            await waiter.cancelled.wait()


async def test_many_patterns_are_compared_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return select(*arguments)

    monkeypatch.setattr(generation, "select", noted)
    tools = [tool_of(weather, name=f"weather_{n}") for n in range(30)]
    async with client_of_tools(asking(), *tools) as (client, _):
        for patterns in (["weather_1"], ["weather_1", *(f"none*{n}" for n in range(100))]):
            body = {**RUN, "trioserve_run_tools": {"tools": patterns}}
            assert (await client.post(CHATS, json=body)).status_code == 200
    assert [one is threading.main_thread() for one in threads] == [True, False]
