"""Runs that are left, cancelled or run out of time, and servers that end under them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.cancellation import CancelAtStep
from tests.support.scripted_server import ScriptedLoader, assert_at_rest, running, serve
from tests.support.scripts import HI, endless
from tests.support.tool_calls import FakeTool, calls, forever, saying
from trioserve import (
    AgentRun,
    ApprovalNeeded,
    DeadlineExceededError,
    RequestEndedError,
    ServerClosingError,
    StepChunk,
    ToolCallContext,
    ToolCalled,
    ToolReturned,
    ToolStarted,
)
from trioserve.concurrency import Phase
from trioserve.fair_limiter import tool_calls, working_for
from trioserve.server.observers.observer import Event, ToolRecord

A_CALL = calls(("work", {"n": 1}))


async def until(run: AgentRun, kind: type) -> Any:
    async for event in run:
        if isinstance(event, kind):
            return event
    raise AssertionError("it did not come")


async def test_leaving_the_block_ends_tools_and_model() -> None:
    backend, _ = saying([calls(("work", {}), ("work", {})), "Done."])
    tool = FakeTool(work=forever)
    async with serve(backend) as server:
        async with server.stream_run(HI, [tool]) as run:
            await until(run, ToolStarted)
            await until(run, ToolStarted)
            await trio.testing.wait_all_tasks_blocked()
            assert tool.n_running == 2
        assert tool.n_running == 0
        await assert_at_rest(server)
        async with server.stream_run(HI, [tool]) as run:
            await until(run, StepChunk)
        await assert_at_rest(server)


async def test_cancelling_anywhere_leaves_nothing() -> None:
    """At each of its awaits, the run is cancelled: no tool, slot or mailbox may be left."""
    both = calls(("work", {}), ("writing", {}))
    tool, writing = FakeTool(), FakeTool("writing", writes=True)
    n, finished = 0, False
    backend, _ = saying([])
    async with serve(backend, parallel=2) as server:

        async def run_all() -> None:
            nonlocal finished
            backend.script = saying([both, "Done."])[0].script
            async with server.stream_run(HI, [tool, writing]) as run:
                async for event in run:
                    if isinstance(event, ApprovalNeeded):
                        run.approve(event.call.id)
            finished = True

        while not finished:
            n += 1
            await CancelAtStep(n).run(run_all)
            assert tool.n_running == writing.n_running == 0
            assert len(server.lifecycle.services.dispatcher) == 0
        await trio.testing.wait_all_tasks_blocked()
        await assert_at_rest(server)
        await server.lifecycle.gate.drained()
    assert n > 50


async def test_many_runs_and_cancels_leave_nothing() -> None:
    backend, _ = saying([])
    backend.script = lambda prompt: "Done." if "<tool_response>" in prompt else A_CALL
    tool = FakeTool(work=forever)
    async with serve(backend, parallel=4) as server:
        await trio.testing.wait_all_tasks_blocked()
        before = trio.lowlevel.current_statistics().tasks_living

        async def leave(n_events: int) -> None:
            async with server.stream_run(HI, [tool]) as run:
                for _ in range(n_events):  # or fewer: output that piled up comes as one
                    if isinstance(await run.__anext__(), ToolStarted):
                        break

        for turn in range(40):
            async with trio.open_nursery() as nursery:
                for each in range(4):
                    nursery.start_soon(leave, 1 + (7 * turn + 3 * each) % 12)
        await assert_at_rest(server)
        assert tool.n_running == 0
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == before


async def test_the_run_ends_from_another_task() -> None:
    backend, _ = saying([A_CALL])
    tool = FakeTool(work=forever)
    async with serve(backend) as server:
        async with server.stream_run(HI, [tool]) as run:
            await until(run, ToolStarted)
            run.cancel()
            with pytest.raises(RequestEndedError):
                await run.read()
            assert run.is_over
            with pytest.raises(RequestEndedError):
                await run.read()
        assert tool.n_running == 0


async def test_a_cancelled_iteration_loses_nothing() -> None:
    backend, _ = saying([A_CALL, "Done."])
    may_end = trio.Event()

    async def wait(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        await may_end.wait()
        return "done"

    async with serve(backend) as server, server.stream_run(HI, [FakeTool(work=wait)]) as run:
        await until(run, ToolStarted)
        with trio.CancelScope() as scope:
            scope.cancel()
            await run.__anext__()
        may_end.set()
        event = await run.__anext__()
        assert isinstance(event, ToolReturned)
        assert (await run.read()).message.content == "Done."


async def test_one_deadline_for_all(mock_clock: trio.testing.MockClock) -> None:
    backend, _ = saying([A_CALL])
    tool = FakeTool(work=forever)
    async with serve(backend) as server:
        async with running(server, [tool], 5) as run:
            await until(run, ToolStarted)
            mock_clock.jump(6)
            with pytest.raises(DeadlineExceededError):
                await run.read()
        assert tool.n_running == 0
        await assert_at_rest(server)
        with pytest.raises(DeadlineExceededError):
            async with running(server, [tool], 0):
                raise AssertionError("unreachable")


async def test_the_deadline_of_the_model(mock_clock: trio.testing.MockClock) -> None:
    async with serve(endless()) as server:
        async with running(server, [], 5) as run:
            await until(run, StepChunk)
            mock_clock.jump(6)
            with pytest.raises(DeadlineExceededError):
                await run.read()
        await assert_at_rest(server)


async def test_the_reasoning_of_the_running_step_can_be_ended() -> None:
    backend, _ = saying([f"<think>Hm.</think>{A_CALL}", "<think>" + "x" * 10_000], n_ctx=2**17)
    async with (
        serve(backend) as server,
        server.stream_run(HI, [FakeTool()], reasoning_control=True) as run,
    ):
        await until(run, ToolReturned)
        assert run.stream is None
        await until(run, StepChunk)
        assert run.stream is not None
        assert await run.stream.end_reasoning()


async def test_who_watches_is_told_of_each_step() -> None:
    backend, _ = saying([A_CALL, "Done."])
    task_ids = []
    async with serve(backend) as server, server.stream_run(HI, [FakeTool()]) as run:
        run.watch(lambda stream: task_ids.append(stream.task_id))
        assert len(task_ids) == 1
        await run.read()
    assert len(task_ids) == 2


# -- the server ends


async def test_a_run_is_finished_while_the_server_drains() -> None:
    backend, _ = saying([A_CALL, A_CALL, "Done."])
    may_end = trio.Event()

    async def wait(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        await may_end.wait()
        return "done"

    async with serve(backend) as server:
        tools = [FakeTool(work=wait)]
        async with trio.open_nursery() as nursery, server.stream_run(HI, tools) as run:
            await until(run, ToolStarted)
            nursery.start_soon(server.drain)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(ServerClosingError):
                await server.run(HI, [FakeTool()])
            may_end.set()
            assert (await run.read()).steps == 3
        assert server.lifecycle.gate.phase.value is not Phase.OPEN


async def test_a_run_ends_when_the_drain_runs_out_of_time(
    mock_clock: trio.testing.MockClock,
) -> None:
    backend, _ = saying([A_CALL])
    tool = FakeTool(work=forever)
    async with serve(backend) as server:
        async with server.stream_run(HI, [tool]) as run, trio.open_nursery() as nursery:
            await until(run, ToolStarted)
            nursery.start_soon(server.drain, 5)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(6)
            with pytest.raises(ServerClosingError, match="5 seconds after"):
                await run.read()
        assert tool.n_running == 0


async def test_a_run_ends_with_its_server() -> None:
    backend, _ = saying([A_CALL])
    tool = FakeTool(work=forever)
    server = serve(backend)
    began, ended = trio.Event(), trio.Event()

    async def run_until_the_end() -> None:
        async with server.stream_run(HI, [tool]) as run:
            await until(run, ToolStarted)
            began.set()
            with pytest.raises(ServerClosingError):
                await run.read()
        ended.set()

    async with trio.open_nursery() as nursery:
        async with server:
            nursery.start_soon(run_until_the_end)
            await began.wait()
        await ended.wait()
    assert tool.n_running == 0


async def test_the_model_may_sleep_while_a_tool_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)
    backends = [saying([A_CALL])[0], saying(["Done."])[0]]
    loader = ScriptedLoader(lambda: backends[len(loader.backends)])

    async def sleep(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        await server.sleep()
        return "slept"

    async with loader.serve() as server:
        answer = await server.run(HI, [FakeTool(work=sleep)])
    assert answer.message.content == "Done."
    assert len(loader.backends) == 2


async def test_a_tool_may_ask_the_same_server_though_it_is_full() -> None:
    backend, prompts = saying([A_CALL, "Paris.", "Done."])

    async def ask(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        answer = await server.chat([{"role": "user", "content": "Where?"}])
        return answer.message.content

    async with serve(backend, parallel=1, max_queue=0) as server:
        answer = await server.run(HI, [FakeTool(work=ask)])
    assert answer.messages[1]["content"] == "Paris."
    assert len(prompts) == 3


# -- reports to observers


async def test_observers_are_told_how_each_call_ended() -> None:
    class Noting:
        def __init__(self) -> None:
            self.ended: list[tuple[str, str, bool]] = []

        def on_event(self, event: Event) -> None:
            if isinstance(event, ToolRecord):
                self.ended.append((event.tool, event.outcome, event.ran))

    async def fail(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        raise ValueError

    every = calls(*((name, {}) for name in ("good", "bad", "none", "slow", "denied", "left")))
    backend, _ = saying([every])
    tools = [
        *(FakeTool("good"), FakeTool("bad", fail), FakeTool("slow", forever)),
        *(FakeTool("denied", writes=True), FakeTool("left", forever)),
    ]
    noting = Noting()
    async with serve(backend) as server:
        server.observers.append(noting)
        async with server.stream_run(HI, tools, approve="none") as run:
            async for event in run:
                if isinstance(event, ToolStarted) and event.call.tool.name == "slow":
                    run.stop(event.call.id)
                if isinstance(event, ToolReturned) and event.stopped:
                    break
            await trio.testing.wait_all_tasks_blocked()
    assert sorted(noting.ended) == [
        ("", "failed", False),
        ("bad", "failed", True),
        ("denied", "denied", False),
        ("good", "finished", True),
        ("left", "cancelled", True),
        ("slow", "stopped", True),
    ]


async def test_runs_share_the_places_of_tools_with_others() -> None:
    """A built-in tool of a run waits while the client has as many calls as it may."""
    backend, _ = saying([calls(("work", {})), "Done."])
    tool = FakeTool()
    async with serve(backend) as server, trio.open_nursery() as nursery:
        with working_for("one"):
            for _ in range(tool_calls().n_each):
                nursery.start_soon(hold_a_place)
        await trio.testing.wait_all_tasks_blocked()
        async with server.stream_run(HI, [tool], client="one") as run:
            await until(run, ToolCalled)
            await trio.testing.wait_all_tasks_blocked()
            assert tool_calls().n_waiting == 1
        assert tool_calls().n_waiting == 0
        backend.script = saying([calls(("work", {})), "Done."])[0].script
        async with server.stream_run(HI, [tool], client="another") as run:
            await until(run, ToolReturned)
        nursery.cancel_scope.cancel()
    assert tool_calls().n_held == 0


async def hold_a_place() -> None:
    async with tool_calls().place():
        await trio.sleep_forever()
