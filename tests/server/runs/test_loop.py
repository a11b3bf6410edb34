"""Runs of tools within an answer: a scripted model, step after step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import trio

from tests.support.scripted_server import assert_at_rest, serve
from tests.support.scripts import HI
from tests.support.tool_calls import FakeTool, calls, saying
from trioserve import (
    ChatChunk,
    ContentDelta,
    InvalidRequestError,
    RunAnswer,
    RunEnded,
    RunEvent,
    Server,
    StepChunk,
    StepStarted,
    Tool,
    ToolCallContext,
    ToolCalled,
    ToolError,
    ToolOutput,
    ToolReturned,
    ToolStarted,
    UnsupportedFieldError,
)
from trioserve.tools.registry import ToolRegistry
from trioserve.tools.tool import ToolSource

A_CALL = calls(("work", {"n": 1}))


async def events_of(server: Server, tools: Any, **fields: Any) -> list[RunEvent]:
    async with server.stream_run(HI, tools, **fields) as run:
        events = [event async for event in run]
    await assert_at_rest(server)
    return events


def results(answer: RunAnswer) -> list[str]:
    return [one["content"] for one in answer.messages if one["role"] == "tool"]


# -- the steps


async def test_a_call_is_run_and_the_model_answers() -> None:
    backend, prompts = saying([f"Let me see.{A_CALL}", "It is warm."])
    tool = FakeTool()
    async with serve(backend) as server:
        events = await events_of(server, [tool])
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    told = [event for event in events if not isinstance(event, StepChunk)]
    assert list(map(type, told)) == [
        *(StepStarted, ToolCalled, ToolStarted, ToolReturned, StepStarted, RunEnded),
    ]
    texts = {1: "", 2: ""}
    for event in events:
        if isinstance(event, StepChunk) and isinstance(event.chunk, ChatChunk):
            deltas = event.chunk.deltas
            texts[event.step] += "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    assert texts == {1: "Let me see.", 2: "It is warm."}
    _, called, started, returned, _, ended = told
    assert isinstance(called, ToolCalled)
    assert isinstance(started, ToolStarted)
    assert isinstance(returned, ToolReturned)
    assert isinstance(ended, RunEnded)
    assert called.call == started.call == returned.call
    assert (called.call.tool, called.call.arguments) == (tool.info, '{"n": 1}')
    assert (returned.content, returned.is_error, returned.stopped) == ("done", False, False)
    answer = ended.answer
    assert (answer.reason, answer.steps, answer.message.content) == ("answer", 2, "It is warm.")
    assert answer.messages == (
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": called.call.id,
                    "type": "function",
                    "function": {"name": "work", "arguments": '{"n": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": called.call.id, "name": "work", "content": "done"},
        {"role": "assistant", "content": "It is warm."},
    )
    assert "<tool_response>\ndone\n</tool_response>" in prompts[1]


async def test_a_step_reads_only_what_is_new_and_so_does_the_next_turn() -> None:
    backend, prompts = saying([A_CALL, "It is warm.", "Yes."])
    async with serve(backend) as server:
        first = await server.run(HI, [FakeTool()])
        then = [*HI, *first.messages, {"role": "user", "content": "Sure?"}]
        second = await server.run(then, [FakeTool()])
    assert prompts[1].startswith(prompts[0])
    timings = first.finished.timings
    assert timings.cache_n >= len(prompts[0])
    assert timings.cache_n + timings.prompt_n == len(first.prompt)
    assert first.timings.predicted_n > timings.predicted_n
    assert second.timings.cache_n >= len(first.prompt)


async def test_reasoning_is_kept_between_the_steps() -> None:
    backend, prompts = saying([f"<think>Hm, where?</think>{A_CALL}", "Here."])
    async with serve(backend) as server:
        answer = await server.run(HI, [FakeTool()])
    assert answer.messages[0]["reasoning_content"] == "Hm, where?"
    assert prompts[1].count("Hm, where?") == 1


async def test_no_tools_are_needed() -> None:
    backend, prompts = saying(["Hello."])
    async with serve(backend) as server:
        answer = await server.run(HI, [])
    assert (answer.reason, answer.message.content) == ("answer", "Hello.")
    assert "<tools>" not in prompts[0]


async def test_the_same_call_again_and_again_comes_to_an_end() -> None:
    backend, _ = saying([A_CALL] * 5)
    tool = FakeTool()
    async with serve(backend, tool_max_steps=3) as server:
        answer = await server.run(HI, [tool])
        assert (answer.reason, answer.steps, len(tool.begun)) == ("max_steps", 3, 3)
        assert answer.message.tool_calls == ()
        assert [one["role"] for one in answer.messages] == ["assistant", "tool"] * 3
        answer = await server.run([*HI, *answer.messages], [tool], max_steps=1)
        assert (answer.reason, answer.steps, len(tool.begun)) == ("max_steps", 1, 4)


async def test_an_answer_that_is_cut_off_calls_nothing() -> None:
    backend, _ = saying([A_CALL])
    tool = FakeTool()
    async with serve(backend) as server:
        answer = await server.run(HI, [tool], max_tokens=len(A_CALL) - 5)
    assert (answer.reason, answer.message.tool_calls, tool.begun) == ("length", (), [])
    assert answer.messages == ({"role": "assistant", "content": ""},)


async def test_a_call_that_has_to_be_made_is_made_once() -> None:
    forced = '{"name": "work", "arguments": {"n": 1}}\n</tool_call>'
    backend, _ = saying([f"<tool_call>\n{forced}", "Done."])
    tool = FakeTool()
    async with serve(backend) as server:
        for choice in ("required", "work"):
            backend.script = saying([f"<tool_call>\n{forced}", "Done."])[0].script
            answer = await server.run(HI, [tool], tool_choice=choice)
            assert (answer.reason, answer.message.content) == ("answer", "Done.")
    assert len(tool.begun) == 2


# -- calls


async def test_calls_of_one_answer_run_at_the_same_time() -> None:
    n_calls = 20
    backend, _ = saying([calls(*(("work", {"n": n}) for n in range(n_calls))), "Done."])
    tool = FakeTool()
    async with serve(backend) as server:
        answer = await server.run(HI, [tool])
    assert len(results(answer)) == n_calls
    assert tool.most_running == 8
    ids = [call["id"] for call in answer.messages[0]["tool_calls"]]
    assert [one["tool_call_id"] for one in answer.messages[1:-1]] == ids


async def test_results_are_in_the_order_of_the_calls() -> None:
    may_end = trio.Event()

    async def first(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        await may_end.wait()
        return "first"

    async def second(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        may_end.set()
        return "second"

    backend, _ = saying([calls(("one", {}), ("two", {})), "Done."])
    async with serve(backend) as server:
        answer = await server.run(HI, [FakeTool("one", first), FakeTool("two", second)])
    assert results(answer) == ["first", "second"]


async def test_output_comes_while_a_tool_runs() -> None:
    async def talk(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        context.on_output("one ")
        context.on_output("two")
        return "all"

    backend, _ = saying([A_CALL, "Done."])
    async with serve(backend) as server:
        events = await events_of(server, [FakeTool(work=talk)], cwd="/srv", runtime="ssh:x")
    assert [event.text for event in events if isinstance(event, ToolOutput)] == ["one ", "two"]


async def test_a_tool_is_told_where_to_work() -> None:
    backend, _ = saying([A_CALL, "Done."])
    tool = FakeTool()
    async with serve(backend) as server:
        await server.run(HI, [tool], cwd="/srv", runtime="ssh:x")
    ((arguments, context),) = tool.begun
    assert arguments == {"n": 1}
    assert (context.cwd, context.runtime) == ("/srv", "ssh:x")


async def raises_ours(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
    raise ToolError("There is no such file.")


async def raises_any(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
    raise ValueError("of a program")


async def raises_group(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raises_any, arguments, context)
    return "never"


@pytest.mark.parametrize(
    ("call", "work", "told"),
    [
        (("work", {}), raises_ours, "There is no such file."),
        (("work", {}), raises_any, "ValueError: of a program"),
        (("work", {}), raises_group, "ExceptionGroup"),
        (("x.test", {}), raises_any, "There is no such tool. There are: work."),
        (("work", "[1, 2]"), raises_any, "must be a JSON object"),
        (("work", '{"a": x.test}'), raises_any, "not JSON"),
    ],
)
async def test_what_goes_wrong_is_told_to_the_model(
    call: tuple[str, Any], work: Any, told: str
) -> None:
    backend, _ = saying([calls(call), "I see."])
    async with serve(backend) as server:
        events = await events_of(server, [FakeTool(work=work)])
    (returned,) = [event for event in events if isinstance(event, ToolReturned)]
    assert returned.is_error
    assert told in json.loads(returned.content)["error"]
    assert "x.test" not in returned.content  # else the model could make up what it has seen
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    assert ended.answer.message.content == "I see."


async def test_halves_of_surrogate_pairs_are_replaced() -> None:
    async def talk(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        return "a\ud800b"

    backend, _ = saying([A_CALL, "Done."])
    async with serve(backend) as server:
        answer = await server.run(HI, [FakeTool(work=talk)])
    assert results(answer) == ["a?b"]


async def test_results_that_are_too_long_are_cut() -> None:
    async def talk(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
        return "long " * 10_000_000

    backend, _ = saying([calls(*[("work", {})] * 3), "Done."], n_ctx=8192)
    async with serve(backend) as server:
        answer = await server.run(HI, [FakeTool(work=talk)])
        n_first = len(answer.prompt) - sum(map(len, results(answer)))
        assert answer.message.content == "Done."
        for text in results(answer):
            assert text.startswith("long long ")
            assert text.endswith("[cut here: all 50000000 characters are too long for the context]")
        room = server.model.n_ctx_seq - n_first
        assert 0.4 * room < sum(map(len, results(answer))) < 0.6 * room


# -- tools of the caller

CLIENT_TOOL = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}


async def test_a_call_of_the_callers_tool_ends_the_run() -> None:
    both = calls(("work", {"n": 1}), ("mine", {"m": 2}))
    backend, prompts = saying([both, "Done."])
    tool = FakeTool()
    async with serve(backend) as server:
        async with server.stream_run(HI, [tool], client_tools=[CLIENT_TOOL]) as run:
            answer = await run.read()
        assert (answer.reason, answer.steps, len(tool.begun)) == ("client_tools", 1, 1)
        (call,) = answer.client_calls
        assert (call.name, call.arguments) == ("mine", '{"m": 2}')
        assert len(answer.messages[0]["tool_calls"]) == 2
        assert [one["role"] for one in answer.messages] == ["assistant", "tool"]
        done = {"role": "tool", "tool_call_id": call.id, "content": "mine is done"}
        async with server.stream_run(
            [*HI, *answer.messages, done], [tool], client_tools=[CLIENT_TOOL]
        ) as run:
            answer = await run.read()
    assert answer.message.content == "Done."
    assert '"mine"' in prompts[0]
    assert "mine is done" in prompts[1]


# -- what is refused


@pytest.mark.parametrize(
    ("tools", "fields", "param"),
    [
        (None, {}, "tools"),
        (["read_file"], {}, "tools"),
        ([FakeTool(), FakeTool()], {}, "tools"),
        ([FakeTool("mine")], {"client_tools": [CLIENT_TOOL]}, "tools"),
        ([lambda: None], {}, "tools"),
        ([FakeTool()], {"max_steps": 0}, "max_steps"),
        ([FakeTool()], {"max_steps": True}, "max_steps"),
        ([FakeTool()], {"approve": "sometimes"}, "approve"),
        ([FakeTool()], {"approval": "all"}, "approval"),
        ([FakeTool()], {"parse_tools": False}, "parse_tools"),
        ([FakeTool()], {"continue_final_message": "content"}, "continue_final_message"),
        ([FakeTool()], {"tool_choice": "other"}, "tool_choice"),
        ([], {"tool_choice": "required"}, "tool_choice"),
        ([FakeTool()], {"max_tokens": -2}, "max_tokens"),
    ],
)
async def test_what_cannot_be_done_is_refused_before_anything_runs(
    tools: Any, fields: dict[str, Any], param: str
) -> None:
    backend, prompts = saying([])
    async with serve(backend) as server:
        with pytest.raises(InvalidRequestError) as caught:
            async with server.stream_run(HI, tools, **fields):
                pass
        await assert_at_rest(server)
    assert caught.value.param == param
    assert prompts == []


@pytest.mark.parametrize("config", [{"skip_chat_parsing": True}, {"jinja": False}])
async def test_servers_that_show_no_tools(config: dict[str, Any]) -> None:
    backend, _ = saying([])
    async with serve(backend, **config) as server:
        with pytest.raises(UnsupportedFieldError):
            await server.run(HI, [FakeTool()])


@attrs.frozen
class Source(ToolSource):
    """Tools of a box."""

    tools: Mapping[str, Tool]


async def test_the_tools_of_the_server_are_named_or_all_there_are() -> None:
    tools = {name: FakeTool(name) for name in ("work", "weather_now", "weather_later")}
    backend, prompts = saying([A_CALL, "Done.", A_CALL, "Done."])
    async with serve(backend) as server:
        server.tools = ToolRegistry([Source(tools)])
        await server.run(HI)
        assert all(f'"{name}"' in prompts[0] for name in tools)
        answer = await server.run(HI, ["weather_*", FakeTool("other")])
        assert '"weather_now"' in prompts[2]
        assert '"other"' in prompts[2]
        assert '"work"' not in prompts[2].partition("</tools>")[0]
        assert "There is no such tool." in results(answer)[0]
    assert len(tools["work"].begun) == 1


async def test_a_server_without_tools_says_how_to_start_one_with_tools() -> None:
    async with serve(saying([])[0]) as server:
        with pytest.raises(InvalidRequestError, match=r"no tools\. Start it with --tools all, or"):
            await server.run(HI)


async def test_a_small_context_gets_the_tools_that_leave_room() -> None:
    names = ("work", "large", "small")
    tools = {name: FakeTool(name) for name in names}
    tools["large"].description = "x" * 2000
    backend, prompts = saying(["Done.", "Done."], n_ctx=4096)
    async with serve(backend) as server:
        server.tools = ToolRegistry([Source(tools)])
        await server.run(HI)
        assert [f'"{name}"' in prompts[0] for name in names] == [True, False, True]
        await server.run(HI, ["large"])
        assert '"large"' in prompts[1]  # it was asked for
