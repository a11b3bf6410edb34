"""How much of a prompt is prefilled, where the last one shared most of it: on a sliding window."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio

from tests.support.measured import Report
from trioserve.config import Config
from trioserve.server import Server
from trioserve.server.stream import ChatCompletion
from trioserve.types.task import shared_length

pytestmark = pytest.mark.system

#: Tokens beyond those that are new.
SLACK = 32
N = 24

Messages = list[dict[str, str]]

_RULES = (
    "Rule {}: a guide answers kindly, names the town it speaks of, keeps to the facts, "
    "and says so when it does not know."
)
SYSTEM = "You are a guide for travellers.\n" + "\n".join(_RULES.format(i) for i in range(1, 25))
THINKING = "Let me think. The traveller asks for a town by the sea, which has old houses. " * 3


@attrs.frozen
class Line:
    """What one request, or several at once, had to prefill."""

    n_prompt: int
    n_new: int
    n_prefilled: int


class Chats:
    """A server, and the texts that it has computed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: list[tuple[int, ...]] = []

    async def ask(self, *chats: Messages) -> tuple[Line, str]:
        """Send chats at the same time. Returns what they prefilled, and the first answer."""
        answers: list[ChatCompletion] = []

        async def ask_one(messages: Messages) -> None:
            answers.append(await self._server.chat(messages, max_tokens=N, temperature=0.0))

        async with trio.open_nursery() as nursery:
            for messages in chats:
                nursery.start_soon(ask_one, messages)
        n_new = 0
        for answer in answers:
            known = max(
                (shared_length(answer.prompt.keys, text) for text in self._known), default=0
            )
            n_new += len(answer.prompt) - known
            self._known.append((*answer.prompt.keys, *answer.tokens))
        n_prefilled = sum(answer.finished.timings.prompt_n for answer in answers)
        line = Line(sum(len(answer.prompt) for answer in answers), n_new, n_prefilled)
        return line, answers[0].message.content or ""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def measure(gemma: Path) -> dict[str, Line]:
    """Go through the cases of one conversation."""
    config = Config(model=str(gemma), chat_template="gemma", threads=1, ctx_size=8192)
    start = [{"role": "system", "content": SYSTEM}, user("Where shall I go in May?")]
    lines: dict[str, Line] = {}
    async with Server(config) as server:
        chats = Chats(server)
        lines["cold"], answer = await chats.ask(start)
        lines["the same prompt again"], _ = await chats.ask(start)
        second = [*start, assistant(answer), user("And in the winter, when it is cold?")]
        lines["the next turn"], _ = await chats.ask(second)
        for text in ("And in the autumn, when it rains?", "And in the spring, by bicycle?"):
            edited = [*second[:-1], user(text)]
            lines["an edit of the last turn"], _ = await chats.ask(edited)
        thought = [*start, assistant(THINKING + answer), user("Which of them is the oldest?")]
        await chats.ask(thought)
        cut = [*start, assistant(answer), user("Which of them is the oldest?")]
        cut = [*cut, assistant("The first."), user("How do I get there?")]
        lines["thinking cut from the history"], _ = await chats.ask(cut)
        other = [start[0], user("Is there a museum of ships?")]
        lines["another user, the same system prompt"], _ = await chats.ask(other)
        fresh = {"role": "system", "content": SYSTEM.replace("travellers", "sailors")}
        towns = ("Rome", "Oslo", "Bern", "Kyiv", "Lima", "Cairo", "Doha", "Graz")
        eight = [[fresh, user(f"What is there in {town}?")] for town in towns]
        lines["eight at once, with one prefix"], _ = await chats.ask(*eight)
    return lines


#: How many requests there are in each case.
CASES = {
    "the same prompt again": 1,
    "the next turn": 1,
    "an edit of the last turn": 1,
    "thinking cut from the history": 1,
    "another user, the same system prompt": 1,
    "eight at once, with one prefix": 8,
}


@pytest.fixture(scope="module")
def lines(gemma: Path, report: Report) -> dict[str, Line]:
    lines = trio.run(measure, gemma)
    for case, line in lines.items():
        report(
            f"{case}: {line.n_prompt} tokens, {line.n_new} of them new, "
            f"{line.n_prefilled} prefilled"
        )
    return lines


def test_the_prompts_are_longer_than_the_window(lines: dict[str, Line]) -> None:
    assert lines["cold"].n_prefilled == lines["cold"].n_prompt > 700


@pytest.mark.parametrize("case", CASES)
def test_what_is_prefilled(lines: dict[str, Line], case: str) -> None:
    line = lines[case]
    assert line.n_prefilled <= line.n_new + CASES[case] * SLACK
