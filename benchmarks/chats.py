"""Chats of several turns that share a system prompt: how many tokens are prefilled twice?

The text of each answer goes back as it came. Prompts are rendered with the server's own template
(``/apply-template``) and sent to ``/completion``, which tells the tokens of an answer: what is
really new can then be counted token by token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import attrs

from benchmarks.driver import Outcome, Plan, Request
from benchmarks.scenarios import Settings
from benchmarks.servers import Target, TargetError, ask
from benchmarks.stats import Metric, Sample, sample_of
from benchmarks.wire import Shape, answer_of, understand

_MARKS = ("Wsystem", "Wuser", "Wanswer", "Wnext")


@attrs.frozen
class Frame:
    """The parts of a chat template before, between and after the texts of a chat."""

    head: str
    after_system: str
    after_user: str
    after_answer: str
    end: str

    def prompt(self, system: str, users: Sequence[str], answers: Sequence[str]) -> str:
        """Render a chat that ends with the last of the users' messages."""
        parts = [self.head, system, self.after_system, users[0]]
        for answer, user in zip(answers, users[1:], strict=True):
            parts += [self.after_user, answer, self.after_answer, user]
        return "".join([*parts, self.end])


def frame_of(target: Target) -> Frame:
    """Ask a server how its chat template frames the messages.

    Raises:
        TargetError: it does not say, or the template changes the texts.
    """
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": r, "content": mark} for r, mark in zip(roles, _MARKS, strict=True)]
    text = ask(target, "POST", "/apply-template", {"messages": messages})
    parts = []
    try:
        rest = str(json.loads(text)["prompt"])
        for mark in _MARKS:
            part, found, rest = rest.partition(mark)
            if not found:
                raise KeyError(mark)
            parts.append(part)
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"{target.name}: /apply-template answered {text[:200]!r}") from None
    head, system, user, answer = parts
    return Frame(head, system, user, answer, rest)


class Seen:
    """Token sequences that were computed once: how much of another is in one of them?"""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Add one."""
        node = self._root
        for token in tokens:
            node = node.setdefault(token, {})

    def known(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix that was seen."""
        node = self._root
        for count, token in enumerate(tokens):
            if token not in node:
                return count
            node = node[token]
        return len(tokens)


@attrs.frozen(kw_only=True)
class Turn:
    """One request of a chat, as it went. `sent` orders the turns of all chats."""

    chat: int
    sent: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # as generated


def new_tokens(turns: Sequence[Turn]) -> int:
    """Return how many prompt tokens no cache could have held.

    No earlier prompt has them, and no answer of the same chat, as it was generated.
    """
    seen, last, new = Seen(), dict[int, Turn](), 0
    for turn in sorted(turns, key=lambda turn: turn.sent):
        before = last.get(turn.chat)
        if before is not None:
            seen.add((*before.prompt, *before.answer))
        new += len(turn.prompt) - seen.known(turn.prompt)
        seen.add(turn.prompt)
        last[turn.chat] = turn
    return new


class _Chat:
    """One chat: its texts so far, and the request that comes next."""

    def __init__(self, shape: Shape, frame: Frame, system: str, users: Sequence[str]) -> None:
        self.shape = shape
        self.frame = frame
        self.system = system
        self.users = users
        self.answers: list[str] = []
        self.prompts: list[str] = []
        self.outcomes: list[Outcome] = []

    def request(self) -> Request:
        users = self.users[: len(self.answers) + 1]
        self.prompts.append(self.frame.prompt(self.system, users, self.answers))
        return self.shape.request(self.prompts[-1])

    def then(self, outcome: Outcome) -> Request | None:
        self.outcomes.append(outcome)
        self.answers.append(answer_of(outcome)[0])
        return self.request() if len(self.answers) < len(self.users) else None


@attrs.frozen
class Chats:
    """Chats that begin at random times within `window` seconds, with a pause after each answer."""

    settings: Settings
    chats: int = 16
    turns: int = 6
    system_tokens: int = 400
    user_tokens: int = 40
    max_tokens: int = 24
    window: float = 4.0
    pause: float = 0.3  # the mean

    metrics = (
        Metric("prefilled / new", "", digits=3),
        Metric("prefilled tokens", "", digits=0),
        Metric("new tokens", "", digits=0),
        Metric("ttft p50", "ms"),
        Metric("ttft p99", "ms"),
        Metric("wall s", "s", digits=2),
    )

    @property
    def name(self) -> str:
        """Such as "16 chats of 6 turns"."""
        return f"{self.chats} chats of {self.turns} turns"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings = self.settings
        shape = settings.having(
            max_tokens=self.max_tokens, api="completion", more={"return_tokens": True}
        ).shape
        frame = frame_of(target)
        system = settings.prompt(self.system_tokens, f"{seed} system")
        rng = random.Random(seed)
        chats, plans = [], []
        for number in range(self.chats):
            users = [
                settings.prompt(self.user_tokens, f"{seed} {number} {turn}")
                for turn in range(self.turns)
            ]
            chat = _Chat(shape, frame, system, users)
            chats.append(chat)
            plans.append(
                Plan(
                    requests=[chat.request()],
                    then=chat.then,
                    delay=rng.uniform(0.0, self.window),
                    pause=rng.uniform(0.0, 2 * self.pause),
                )
            )
        planned = self.chats * self.turns
        sample = sample_of(
            settings.run(target, plans), planned=planned, expected_tokens=self.max_tokens
        )
        if not sample.failed and "prefilled tokens" in sample.numbers:
            new = new_tokens(_turns(target, chats))
            sample.numbers["new tokens"] = new
            sample.numbers["prefilled / new"] = sample.numbers["prefilled tokens"] / new
        return sample


def _turns(target: Target, chats: Sequence[_Chat]) -> list[Turn]:
    turns = []
    for number, chat in enumerate(chats):
        for prompt, outcome in zip(chat.prompts, chat.outcomes, strict=True):
            body = {"content": prompt, "add_special": True}
            ids = tuple(json.loads(ask(target, "POST", "/tokenize", body))["tokens"])
            stream = understand(outcome)
            if stream.prompt_tokens not in (-1, len(ids)):
                raise TargetError(
                    f"{target.name}: a prompt of {len(ids)} tokens counted {stream.prompt_tokens}"
                )
            answer = tuple(answer_of(outcome)[1])
            turns.append(Turn(chat=number, sent=outcome.sent, prompt=ids, answer=answer))
    return turns
