"""The events between a run and its reader, and how results are cut."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trioserve import AgentRun, RunCall, RunEvent, StepStarted, ToolInfo, ToolOutput
from trioserve.server.runs.loop import fit, read_arguments

CALL = RunCall("call_1", 1, ToolInfo(name="work"), "{}")


def put(feed: AgentRun, n: int) -> None:
    for _ in range(n):
        feed.put(StepStarted(feed.new_id(), 1))


async def taken(feed: AgentRun) -> list[RunEvent]:
    events = []
    with pytest.raises(StopAsyncIteration):
        while True:
            events.append(await anext(feed))
    return events


async def test_the_model_waits_for_a_reader_who_is_behind() -> None:
    feed, written = AgentRun(), 0

    async def write() -> None:
        nonlocal written
        while True:
            await feed.room()
            put(feed, 1)
            written += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        assert written == 16
        await anext(feed)
        await trio.testing.wait_all_tasks_blocked()
        assert written == 17
        nursery.cancel_scope.cancel()


async def test_output_that_nobody_reads_takes_a_bounded_amount_of_memory() -> None:
    feed = AgentRun()
    for _ in range(1000):
        feed.put_output(CALL, "x" * 2**16)
    feed.end()
    texts = [event.text for event in await taken(feed) if isinstance(event, ToolOutput)]
    assert sum(map(len, texts)) < 2**20 + 100
    assert [text for text in texts if "not shown" in text] == texts[-1:]


async def test_output_is_shown_again_to_a_reader_who_has_caught_up() -> None:
    feed = AgentRun()
    for _ in range(2):
        feed.put_output(CALL, "x" * 2**20)
        feed.put_output(CALL, "y")
        feed.put_output(CALL, "z")
        assert isinstance(first := await anext(feed), ToolOutput)
        assert first.text == "x" * 2**20
        assert isinstance(second := await anext(feed), ToolOutput)
        assert "not shown" in second.text


# -- results


class Bytes:
    """A token is a byte."""

    def __init__(self) -> None:
        self.longest = 0

    async def tokenize(
        self, prompt: str, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[int, ...]:
        assert not add_special and not parse_special
        self.longest = max(self.longest, len(prompt))
        await trio.lowlevel.checkpoint()
        return tuple(prompt.encode())

    async def detokenize(self, tokens: tuple[int, ...]) -> str:
        await trio.lowlevel.checkpoint()
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("text", ["", "short", "x" * 100, "é" * 50])
async def test_what_fits_stays_as_it_is(text: str) -> None:
    assert await fit(text, 100, Bytes()) == text


@pytest.mark.parametrize("text", ["x" * 101, "é" * 51, "x" * 10**6, "日本" * 10**6])
async def test_what_does_not_fit_has_its_beginning_and_a_note(text: str) -> None:
    tokens = Bytes()
    cut, _, note = (await fit(text, 100, tokens)).rpartition("\n")
    assert text.startswith(cut.rstrip("\ufffd"))
    assert 60 < len(cut.encode()) <= 80
    assert note == f"[cut here: all {len(text)} characters are too long for the context]"
    assert tokens.longest <= 1600


@pytest.mark.parametrize("n_tokens", [0, 3, -5])
async def test_where_nothing_fits_there_is_the_note(n_tokens: int) -> None:
    assert (await fit("some text", n_tokens, Bytes())).strip().startswith("[cut here")


# -- arguments


@pytest.mark.parametrize("text", ["", "{}", '{"a": [1, {"b": null}]}'])
def test_arguments_are_an_object(text: str) -> None:
    assert isinstance(read_arguments(text), dict)


@pytest.mark.parametrize(
    "text", ["[]", "1", "null", "{", '{"a": 1', "{'a': 1}", '{"a":' * 10**5, "9" * 5000]
)
def test_other_arguments_are_refused_in_words_for_a_model(text: str) -> None:
    with pytest.raises(ValueError, match="arguments") as caught:
        read_arguments(text)
    assert len(str(caught.value)) < 500
