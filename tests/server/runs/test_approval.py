"""Calls that may change something, and what people say about them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.scripted_server import assert_at_rest, serve
from tests.support.scripts import HI
from tests.support.tool_calls import FakeTool, calls, forever, saying
from trioserve import (
    ApprovalGiven,
    ApprovalNeeded,
    RunAnswer,
    RunCall,
    ToolCallContext,
    ToolCallDecidedError,
    ToolReturned,
    ToolStarted,
    UnknownToolCallError,
)
from trioserve.server.runs.run import AgentRun

A_CALL = calls(("work", {"n": 1}))


def result(answer: RunAnswer) -> str:
    (content,) = [one["content"] for one in answer.messages if one["role"] == "tool"]
    return content


async def test_a_call_that_writes_waits_until_it_is_approved() -> None:
    backend, _ = saying([A_CALL, "Done."])
    tool = FakeTool(writes=True, diff="-a\n+b")
    async with serve(backend) as server:
        async with server.stream_run(HI, [tool]) as run:
            told = []
            async for event in run:
                if isinstance(event, ApprovalNeeded):
                    await trio.testing.wait_all_tasks_blocked()
                    assert tool.begun == []
                    assert event.preview == "-a\n+b"
                    assert len(server.lifecycle.services.dispatcher) == 0  # no slot is held
                    run.approve(event.call.id, "looks good")
                    with pytest.raises(ToolCallDecidedError):
                        run.deny(event.call.id)
                if isinstance(event, ApprovalNeeded | ApprovalGiven | ToolStarted | ToolReturned):
                    told.append(event)
        await assert_at_rest(server)
    assert list(map(type, told)) == [ApprovalNeeded, ApprovalGiven, ToolStarted, ToolReturned]
    given = told[1]
    assert isinstance(given, ApprovalGiven)
    assert (given.approved, given.reason) == (True, "looks good")
    assert len(tool.begun) == 1
    assert run.answer is not None
    assert result(run.answer) == "done"


async def test_a_call_that_is_denied_does_not_run_and_the_model_is_told_why() -> None:
    backend, _ = saying([A_CALL, "I see."])
    tool = FakeTool(writes=True)
    async with serve(backend) as server, server.stream_run(HI, [tool]) as run:
        async for event in run:
            if isinstance(event, ApprovalNeeded):
                run.deny(event.call.id, "not today")
    assert tool.begun == []
    assert run.answer is not None
    assert json.loads(result(run.answer)) == {"error": "This call was not allowed: not today."}
    assert run.answer.message.content == "I see."


@pytest.mark.parametrize(("approve", "runs"), [("all", True), ("none", False), ("ask", False)])
async def test_a_policy_decides_where_nobody_is_asked(approve: Any, runs: bool) -> None:
    backend, _ = saying([A_CALL, "Done."])
    tool = FakeTool(writes=True)
    async with serve(backend) as server:
        answer = await server.run(HI, [tool], approve=approve)
    assert bool(tool.begun) == runs
    assert ("not allowed" in result(answer)) != runs


async def test_a_function_decides() -> None:
    asked: list[RunCall] = []

    async def approve(call: RunCall) -> bool:
        asked.append(call)
        return json.loads(call.arguments)["n"] == 1

    backend, _ = saying([A_CALL, calls(("work", {"n": 2})), "Done."])
    tool = FakeTool(writes=True)
    async with serve(backend) as server:
        await server.run(HI, [tool, FakeTool("other")], approve=approve)
    assert [call.arguments for call in asked] == ['{"n": 1}', '{"n": 2}']
    assert [arguments for arguments, _ in tool.begun] == [{"n": 1}]


async def test_a_function_that_fails_ends_the_run() -> None:
    async def approve(call: RunCall) -> bool:
        raise LookupError("of the program")

    backend, _ = saying([calls(("work", {}), ("other", {}))])
    other = FakeTool("other", forever)
    async with serve(backend) as server:
        with pytest.raises(LookupError, match="of the program"):
            await server.run(HI, [FakeTool(writes=True), other], approve=approve)
        assert other.n_running == 0
        await assert_at_rest(server)


async def test_a_preview_that_fails_is_none() -> None:
    class Hopeless(FakeTool):
        async def preview(self, arguments: Mapping[str, Any], context: ToolCallContext) -> None:
            raise OSError("no such file")

    backend, _ = saying([A_CALL, "Done."])
    async with serve(backend) as server, server.stream_run(HI, [Hopeless(writes=True)]) as run:
        async for event in run:
            if isinstance(event, ApprovalNeeded):
                assert event.preview is None
                run.approve(event.call.id)
    assert run.answer is not None
    assert result(run.answer) == "done"


# -- stopping one call


@pytest.mark.parametrize("when", [ApprovalNeeded, ToolStarted])
async def test_a_call_can_be_stopped_and_the_others_go_on(when: type) -> None:
    backend, _ = saying([calls(("slow", {}), ("quick", {})), "Done."])
    slow, quick = FakeTool("slow", forever, writes=True), FakeTool("quick")
    async with serve(backend) as server, server.stream_run(HI, [slow, quick]) as run:
        returned = []
        async for event in run:
            if isinstance(event, ApprovalNeeded) and when is ToolStarted:
                run.approve(event.call.id)
            if isinstance(event, when) and event.call.tool.name == "slow":
                run.stop(event.call.id)
            if isinstance(event, ToolReturned):
                returned.append(event)
                with pytest.raises(ToolCallDecidedError):
                    run.stop(event.call.id)
                with pytest.raises(ToolCallDecidedError):
                    run.approve(event.call.id)
    assert {event.call.tool.name: event.stopped for event in returned} == {
        "slow": True,
        "quick": False,
    }
    (stopped,) = [event for event in returned if event.stopped]
    assert "stopped this call" in stopped.content
    assert stopped.is_error
    assert slow.n_running == 0
    assert run.answer is not None
    assert run.answer.message.content == "Done."


async def test_calls_that_are_not_there() -> None:
    backend, _ = saying(["Hello."])
    async with serve(backend) as server, server.stream_run(HI, [FakeTool()]) as run:
        for act in (run.approve, run.deny, run.stop):
            with pytest.raises(UnknownToolCallError) as caught:
                act("call_1")
            assert caught.value.param == "call_id"


# -- alone


async def test_a_call_that_nobody_decides_about_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    run = AgentRun()
    with run.running("a"):
        decision = await run.decision("a", 600)
        assert not decision.approved
        assert "within 600 seconds" in decision.reason
        with pytest.raises(ToolCallDecidedError):
            run.approve("a")


async def test_a_decision_before_anybody_waits_is_none() -> None:
    run = AgentRun()
    with run.running("a"):
        with pytest.raises(ToolCallDecidedError):
            run.approve("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.decision, "a", 600)
            await trio.testing.wait_all_tasks_blocked()
            run.deny("a", "no")
        with pytest.raises(ToolCallDecidedError):
            run.approve("a")
