"""Tools that are Python functions: their descriptions for the model, and their calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.taken_threads import all_taken
from trioserve import (
    InvalidRequestError,
    ToolCallContext,
    ToolError,
    ToolResult,
    tool_of,
)


async def call(function: Callable[..., Any], **arguments: Any) -> ToolResult:
    return await tool_of(function).call(arguments, ToolCallContext())


# -- descriptions


@dataclass
class Place:
    city: str
    country: str = "France"


def forecast(
    place: Place,
    days: Annotated[int, msgspec.Meta(ge=1, le=9)],
    unit: Literal["C", "F"] = "C",
    places: list[str] = [],  # noqa: B006 - what somebody may write
) -> str:
    """Tell the weather of the next days.

    It is a guess.

    Args:
        place: where,
            in the world.
        days (int): how many.
        unknown: is none.

    Returns:
        text: of the forecast.
    """
    return f"{place.city}, {place.country}: {days} {unit} {places}"


def test_type_hints_and_docstring_become_a_schema() -> None:
    info = tool_of(forecast).info
    assert info.name == "forecast"
    assert info.description == "Tell the weather of the next days.\n\nIt is a guess."
    assert info.kind == "function"
    assert not info.writes
    schema = info.parameters
    assert schema["required"] == ["place", "days"]
    properties = schema["properties"]
    assert properties["place"]["description"] == "where, in the world."
    assert properties["days"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "description": "how many.",
    }
    assert properties["unit"] == {"enum": ["C", "F"], "default": "C"}
    assert properties["places"] == {"type": "array", "items": {"type": "string"}}
    assert schema["$defs"]["Place"]["properties"]["city"] == {"type": "string"}


def test_what_the_program_says_wins() -> None:
    info = tool_of(forecast, name="weather", description="Rain?", writes=True).info
    assert (info.name, info.description, info.writes) == ("weather", "Rain?", True)


def test_functions_of_all_kinds() -> None:
    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        def add(self, m: int) -> int:
            return self.n + m

        async def __call__(self, m: int) -> int:
            return self.n + m

    @functools.wraps(forecast)
    def wrapped(*args: Any, **kwargs: Any) -> str:
        return forecast(*args, **kwargs)

    async def run() -> None:
        for tool in (
            tool_of(Adder(40).add),
            tool_of(Adder(40), name="add"),
            tool_of(functools.partial(Adder.add, Adder(40)), name="add"),
        ):
            assert list(tool.info.parameters["properties"]) == ["m"]
            result = await tool.call({"m": 2}, ToolCallContext())
            assert result.text == "42"
        result = await call(wrapped, place={"city": "Paris"}, days=3)
        assert result.text == "Paris, France: 3 C []"

    trio.run(run)


def no_hints(a, b=None):  # type: ignore[no-untyped-def]
    return [a, b]


async def test_a_function_without_hints_takes_anything() -> None:
    assert (await call(no_hints, a={"x": 1})).text == '[{"x": 1}, null]'


def many(*numbers: int) -> int:
    return sum(numbers)


def positional(number: int, /) -> int:
    return number


def of_a_lock(lock: threading.Lock) -> None:
    """Has a type that JSON has not."""


def of_nothing(a: Missing) -> None:  # type: ignore[name-defined] # noqa: F821
    """Has a hint that is not there."""


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda: None, "no name of a tool"),
        ({"type": "function"}, "neither a function"),
        (many, "numbers"),
        (positional, "number"),
        (of_a_lock, "cannot be described"),
        (of_nothing, "not defined"),
    ],
)
def test_functions_that_are_no_tools(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        tool_of(function)
    assert caught.value.param == "tools"


# -- how they are called


async def test_arguments_are_read_as_the_hints_say() -> None:
    result = await call(forecast, place={"city": "Oslo", "country": "Norway"}, days="2", unit="F")
    assert result.text == "Oslo, Norway: 2 F []"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"place": {"city": "Oslo"}}, "missing required field `days`"),
        ({"place": {"city": "Oslo"}, "days": 10}, "`int` <= 9"),
        ({"place": {"city": "Oslo"}, "days": 1, "hours": 2}, "unknown field `hours`"),
        ({"place": "Oslo", "days": 1}, "Expected `object`"),
    ],
)
async def test_arguments_that_do_not_fit(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        await call(forecast, **arguments)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        (None, "null"),
        ({"a": [1, 2.5, True]}, '{"a": [1, 2.5, true]}'),
        ({1: {"é"}}, '{"1": ["é"]}'),
        (Place("Rome"), '{"city": "Rome", "country": "France"}'),
        (b"bytes", '"Ynl0ZXM="'),
    ],
)
async def test_what_is_returned_becomes_text(value: Any, text: str) -> None:
    def give() -> Any:
        return value

    assert (await call(give)).text == text


async def test_a_result_of_its_own() -> None:
    async def give() -> ToolResult:
        return ToolResult({"error": "no"}, diff="+x")

    result = await call(give)
    assert (result.is_error, result.diff) == (True, "+x")


async def test_a_value_without_a_form_in_json() -> None:
    def give() -> object:
        return threading.Lock()

    with pytest.raises(ToolError, match="no form in JSON"):
        await call(give)


async def test_a_plain_function_runs_in_a_thread_and_an_async_one_does_not() -> None:
    def thread() -> int:
        return threading.get_ident()

    async def task() -> int:
        return threading.get_ident()

    assert (await call(thread)).text != str(threading.get_ident())
    assert (await call(task)).text == str(threading.get_ident())


async def test_the_context_of_the_call_is_not_the_models() -> None:
    said: list[str] = []
    context = ToolCallContext(cwd="/srv", on_output=said.append)

    def thread(name: str, context: ToolCallContext) -> str:
        context.on_output(f"{name} 1")
        return str(context.cwd)

    async def task(name: str, context: ToolCallContext) -> str:
        context.on_output(f"{name} 2")
        return str(context.cwd)

    for function in (thread, task):
        tool = tool_of(function)
        assert tool.info.streams
        assert list(tool.info.parameters["properties"]) == ["name"]
        assert (await tool.call({"name": "a"}, context)).text == "/srv"
    assert said == ["a 1", "a 2"]


@pytest.mark.parametrize("abandon", [False, True])
async def test_a_cancelled_thread_is_waited_for_unless_it_may_be_left(abandon: bool) -> None:
    begun, may_end, ended = trio.Event(), threading.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def block() -> None:
        token.run_sync_soon(begun.set)
        may_end.wait(5)
        ended.set()

    tool = tool_of(block, abandon_on_cancel=abandon)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tool.call, {}, ToolCallContext())
        await begun.wait()
        nursery.cancel_scope.cancel()
        if not abandon:
            may_end.set()
    assert ended.is_set() != abandon
    may_end.set()


async def test_functions_take_no_thread_of_the_servers() -> None:
    with all_taken() as limiter:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tool_of(lambda: "done", name="work").call, {}, ToolCallContext())
            await wait_all_tasks_blocked()
            assert limiter.statistics().tasks_waiting == 0
            nursery.cancel_scope.cancel()
