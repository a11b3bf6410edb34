"""MCP servers that are programs: those that behave, and those that do not."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.mcp_servers import call, odd, opened, pids_in
from tests.support.processes import is_alive
from tests.support.waiting import patiently, until
from trioserve.tools.mcp import messages, stdio
from trioserve.tools.mcp.entries import StdioEntry
from trioserve.tools.mcp.listing import Listing
from trioserve.tools.mcp.server import McpServer
from trioserve.tools.mcp.tools import McpServers
from trioserve.tools.tool import ToolCallContext

pytestmark = pytest.mark.system


async def test_a_tool_is_listed_and_called() -> None:
    async with opened(a=odd()) as servers:
        info = servers.tools["a_echo"].info
        assert (info.kind, info.mcp_server, info.description) == ("mcp", "a", "The tool echo")
        assert not info.writes
        assert servers.tools["a_sleep"].info.writes  # it does not say that it only reads
        answer = await call(servers, "a_echo", text="hello")
        assert answer.answer == {"plain_text_response": "hello"}


async def test_calls_at_the_same_time_share_one_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    answers = {}

    async def one(i: int) -> None:
        answers[i] = (await call(servers, "a_echo", text=str(i))).text

    async with opened(a=odd("log", pids)) as servers, trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(one, i)
    assert answers == {i: str(i) for i in range(50)}
    listing, calling = pids_in(pids)
    assert not is_alive(listing)
    assert not is_alive(calling)


async def test_the_process_gets_what_the_entry_says_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("MY_TOKEN", "given")
    entry = odd(cwd=str(tmp_path), env={"TOKEN": "${env:MY_TOKEN}", "LANG": "C"})
    async with opened(a=entry) as servers:
        told = json.loads((await call(servers, "a_environment")).text)
    assert told["cwd"] == str(tmp_path)
    assert (told["env"]["TOKEN"], told["env"]["LANG"]) == ("given", "C")
    assert told["env"]["PATH"] == os.environ["PATH"]
    assert "OPENAI_API_KEY" not in told["env"]
    assert "MY_TOKEN" not in told["env"]


async def test_one_that_cannot_be_started_or_is_silent_keeps_nobody_waiting() -> None:
    with patiently():
        async with opened(
            wait_seconds=0.5,
            good=odd(),
            none={"command": "no-such-program"},
            nowhere=odd(cwd="/nowhere"),
            silent=odd("silent"),
        ) as servers:
            while "good_echo" not in servers.tools:
                await trio.sleep(0.01)
            assert (await call(servers, "good_echo", text="x")).text == "x"
            assert {tool.info.mcp_server for tool in servers.tools.values()} == {"good"}


async def test_a_server_that_ends_is_told_of_and_started_again(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with opened(a=odd("log", pids)) as servers:
        assert (await call(servers, "a_echo", text="1")).text == "1"
        answer = await call(servers, "a_die")
        assert answer.is_error
        assert "'a'" in answer.answer["error"]
        assert "ended with status 3; it wrote last: the last words" in answer.answer["error"]
        assert (await call(servers, "a_echo", text="2")).text == "2"
    assert len(set(pids_in(pids))) == 3


async def test_all_calls_of_a_server_that_ends_are_told(tmp_path: Path) -> None:
    answers = []

    async def sleep() -> None:
        answers.append(await call(servers, "a_sleep", seconds=1000))

    async with opened(a=odd()) as servers, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(sleep)
        await call(servers, "a_echo", text="they are on their way")
        await call(servers, "a_die")
    assert ["status 3" in answer.answer["error"] for answer in answers] == [True] * 5


async def test_a_call_that_only_reads_is_made_again(tmp_path: Path) -> None:
    async with opened(a=odd("", tmp_path / "died")) as servers:
        assert (await call(servers, "a_die_once")).text == "alive"


async def test_a_server_whose_first_start_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.tools.mcp.server.RETRY_SECONDS", (0.01,))
    async with opened(a=odd("fails once", tmp_path / "failed")) as servers:
        await until(lambda: "a_echo" in servers.tools)


async def test_a_call_that_takes_too_long_is_given_up() -> None:
    async with opened(a=odd(timeout_ms=100)) as servers:
        answer = await call(servers, "a_sleep", seconds=1000)
        assert answer.answer == {
            "error": "The MCP server 'a' has failed: it has no answer after 0.1 s."
        }
        assert "notifications/cancelled" in (await call(servers, "a_seen")).text


async def test_a_call_that_tells_its_progress_may_take_longer() -> None:
    told: list[str] = []
    async with opened(a=odd(timeout_ms=800)) as servers:
        answer = await servers.tools["a_progress"].call(
            {"n": 4, "seconds": 0.25}, ToolCallContext(on_output=told.append)
        )
    assert answer.text == "done"
    assert told == [f"{i}: step {i}\n" for i in range(1, 5)]


async def test_a_call_when_the_tools_are_closed() -> None:
    answers = []

    async def sleep() -> None:
        answers.append(await tools["a_sleep"].call({"seconds": 1000}, ToolCallContext()))

    async with trio.open_nursery() as nursery, opened(a=odd()) as servers:
        tools = servers.tools
        await call(servers, "a_echo")
        nursery.start_soon(sleep)
        await trio.testing.wait_all_tasks_blocked()
    await sleep()
    assert [answer.answer["error"] for answer in answers] == [
        "The MCP server 'a' has failed: it ended before it had an answer.",
        "The MCP server 'a' has failed: it was stopped.",
    ]


async def test_a_cancelled_call_is_cancelled_at_the_server(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    async with opened(a=odd("log", pids)) as servers:
        await call(servers, "a_echo")
        start = trio.current_time()
        with trio.move_on_after(0.05):
            await call(servers, "a_sleep", seconds=1000)
        assert trio.current_time() - start < 20
        assert "notifications/cancelled" in (await call(servers, "a_seen")).text
    assert len(pids_in(pids)) == 2  # it answered afterwards, and was not started again


async def test_a_server_that_hears_nothing_after_a_cancelled_call_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.tools.mcp.session.PING_SECONDS", 0.2)
    pids = tmp_path / "pids"
    async with opened(a=odd("log", pids)) as servers:
        await call(servers, "a_echo")
        with trio.move_on_after(0.05):
            await call(servers, "a_block", seconds=1000)
        with patiently():
            assert (await call(servers, "a_echo", text="x")).text == "x"
    _, blocked, fresh = pids_in(pids)
    assert not is_alive(blocked)
    assert not is_alive(fresh)


async def test_a_server_that_is_busy_with_another_call_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trioserve.tools.mcp.session.PING_SECONDS", 0.05)
    answers = []

    async def block() -> None:
        answers.append(await call(servers, "a_block", seconds=0.5))

    async with opened(a=odd()) as servers:
        await call(servers, "a_echo")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(block)
            with trio.move_on_after(0.1):
                await call(servers, "a_sleep", seconds=1000)
    assert answers[0].answer == {"error": "'block'"}  # the answer of the server


async def test_odd_starts() -> None:
    modes = ("gone", "old", "endless pages", "forks", "chatty", "grandchild")
    entries = {mode.replace(" ", "_"): odd(mode) for mode in modes}
    async with opened(wait_seconds=10, **entries) as servers:
        assert {tool.info.mcp_server for tool in servers.tools.values()} == {"chatty", "grandchild"}
        assert (await call(servers, "chatty_echo", text="x")).text == "x"
        assert (await call(servers, "grandchild_echo", text="x")).text == "x"  # it holds the pipes
        start = trio.current_time()
    assert trio.current_time() - start < 20


async def test_a_message_without_an_end_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "MAX_MESSAGE", 2**20)
    async with opened(a=odd()) as servers:
        answer = await call(servers, "a_endless")
        assert "a message of more than 1,048,576 bytes" in answer.answer["error"]
        assert (await call(servers, "a_echo", text="x")).text == "x"


async def test_a_flood_of_notifications_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MESSAGES_PER_SECOND", 1000)
    async with opened(a=odd()) as servers:
        await call(servers, "a_echo")
        start = trio.current_time()
        assert (await call(servers, "a_flood", n=1500)).text == "dry"
        assert 0.4 < trio.current_time() - start < 60


async def test_calls_wait_for_a_server_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_UNREAD", 2**18)
    answers = []

    async def send() -> None:
        answers.append((await call(servers, "a_echo", text="x" * 300_000)).text)

    async with opened(a=odd()) as servers, trio.open_nursery() as nursery:
        nursery.start_soon(partial(call, servers, "a_block", seconds=0.3))
        for _ in range(5):
            nursery.start_soon(send)
    assert answers == ["x" * 300_000] * 5


async def test_a_call_that_waits_to_be_sent_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_UNREAD", 2**16)
    async with opened(a=odd()) as servers:
        await call(servers, "a_echo")
        start = trio.current_time()
        with trio.move_on_after(0.1):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(call, servers, "a_block", seconds=1000))
                for _ in range(5):
                    nursery.start_soon(partial(call, servers, "a_echo", text="x" * 300_000))
        assert trio.current_time() - start < 20


ANSWER = '{"jsonrpc": "2.0", "id": ID, "result": %s}'
TEXT = ANSWER % '{"content": [{"type": "text", "text": "%s"}]}'
NOTHING = ANSWER % '{"content": []}'

LINES = {
    TEXT % "é😀": "é😀",
    TEXT % "a\\ud800": "a\ufffd",
    ANSWER % '{"structuredContent": {"a": 1}}': '{"a": 1}',
    'no JSON\n[1]\n{"a": 1}\n\n' + NOTHING: "",
    '{"jsonrpc": "2.0", "id": 999, "result": {}}\n' + NOTHING + "\r": "",
    "[" * 100_000 + "\n" + NOTHING: "",
}


async def test_lines_of_servers() -> None:
    async with opened(a=odd()) as servers:
        for line, text in LINES.items():
            answer = await call(servers, "a_say", line=line + "\n")
            assert answer.answer == {"plain_text_response": text}, line[:100]


async def test_an_answer_that_makes_no_sense() -> None:
    async with opened(a=odd()) as servers:
        for result in ({"content": "text"}, {"content": [{"type": "smell"}]}, 7, "text", [1]):
            answer = await call(servers, "a_content", result=result)
            assert "its answer makes no sense" in answer.answer["error"]


async def test_an_answer_of_many_parts_is_cut() -> None:
    part = {"type": "text", "text": "x"}
    async with opened(a=odd()) as servers:
        result = {"content": [part] * 5000, "structuredContent": {"a": [part] * 5000}}
        text = (await call(servers, "a_content", result=result)).text
    assert text == "x\n" * 1000 + "[4,000 more parts, not shown]"


async def test_arguments_that_are_nested_too_deeply() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    async with opened(a=odd()) as servers:
        answer = await call(servers, "a_echo", text=nested)
        assert answer.answer == {"error": "The arguments are nested too deeply."}


REQUESTS = {
    "sampling/createMessage": {"messages": [], "maxTokens": 1},
    "elicitation/create": {"message": "Password?", "requestedSchema": {"type": "object"}},
    "roots/list": {},
    "tasks/run": {},
}


async def test_requests_of_a_server_are_refused() -> None:
    async with opened(a=odd()) as servers:
        for method, params in REQUESTS.items():
            answer = await call(servers, "a_ask", method=method, params=params)
            assert "message" in json.loads(answer.text)  # an error
        assert (await call(servers, "a_echo", text="x")).text == "x"


async def test_a_list_that_has_changed(tmp_path: Path) -> None:
    async with opened(a=odd("hidden", tmp_path / "shown")) as servers:
        assert list(servers.tools) == ["a_more"]
        await call(servers, "a_more")
        await until(lambda: "a_echo" in servers.tools)


async def test_ten_thousand_tools_are_cut() -> None:
    async with opened(a=odd("many")) as servers:
        assert len(servers.tools) == 1024


async def test_tools_that_make_no_sense_are_skipped() -> None:
    async with opened(a=odd("nonsense")) as servers:
        assert list(servers.tools) == ["a_good", "a_no_schema", "a_list", "a_half___pair"]
        for name in ("a_no_schema", "a_list"):
            assert servers.tools[name].info.parameters == {"type": "object", "properties": {}}


async def test_names_that_are_taken() -> None:
    async with opened(taken=["a_echo"], **{"a": odd(), "a b": odd(), "a_b": odd()}) as servers:
        of = {name: tool.info.mcp_server for name, tool in servers.tools.items()}
    assert "a_echo" not in of
    assert of["a_sleep"] == "a"
    assert of["a_b_echo"] == "a b"
    assert "a_b" not in of.values()


async def test_a_failure_of_one_server_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = McpServers.describe

    def fails(servers: McpServers, server: McpServer, listing: Listing) -> None:
        if server.entry.name == "bad":
            raise ValueError("not foreseen")
        describe(servers, server, listing)

    monkeypatch.setattr(McpServers, "describe", fails)
    async with opened(bad=odd(), good=odd("hidden", os.devnull)) as servers:
        assert {tool.info.mcp_server for tool in servers.tools.values()} == {"good"}
        assert (await call(servers, "good_echo", text="x")).text == "x"


async def test_messages_that_the_protocol_does_not_need_are_ignored() -> None:
    async with opened(a=odd()) as servers:
        for id in ('"%s"' % ("9" * 5000), str(10**400), '"%s"' % ("x" * 300)):
            lines = [
                f'{{"jsonrpc": "2.0", "id": {id}, "method": "ping"}}',
                f'{{"jsonrpc": "2.0", "id": {id}, "result": {{}}}}',
                *(
                    f'{{"jsonrpc": "2.0", "method": "notifications/{what}", "params": {params}}}'
                    for what, params in (
                        ("cancelled", f'{{"requestId": {id}}}'),
                        ("progress", f'{{"progressToken": {id}, "progress": 1}}'),
                        ("progress", f'{{"progressToken": ID, "progress": {10**400}}}'),
                    )
                ),
                NOTHING + "\n",
            ]
            assert (await call(servers, "a_say", line="\n".join(lines))).text == ""
        assert "ping" not in (await call(servers, "a_seen")).text
        assert "an answer" not in (await call(servers, "a_seen")).text


@pytest.mark.parametrize(
    ("command", "env", "program"),
    [
        ("python", {}, sys.executable),
        ("python3", {"TOKEN": "x"}, sys.executable),
        ("python", {"PATH": "/opt/bin"}, "python"),
        ("python3", {"VIRTUAL_ENV": "/opt"}, "python3"),
        ("/usr/bin/python3", {}, "/usr/bin/python3"),
        ("node", {}, "node"),
    ],
)
def test_python_is_that_of_the_server(command: str, env: dict[str, str], program: str) -> None:
    assert stdio.program_of(StdioEntry(name="a", command=command, env=env)) == program
