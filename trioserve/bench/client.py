"""Sends a completion to a server, and notes when its tokens come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import trio

from trioserve.bench.prompts import words
from trioserve.errors import UnavailableError
from trioserve.remote.answers import AnswerEvent
from trioserve.remote.client import ServerClient

#: Words of the two prompts that show how many tokens a word has.
_FEW, _MANY = 32, 96


@attrs.frozen(kw_only=True)
class Answer:
    """A streamed answer. Times are in seconds, of `trio.current_time`.

    `times` holds the arrival of each event with text, and `n_cached` is None where the server does
    not report it.
    """

    sent: float
    times: Sequence[float]
    n_prompt: int
    n_cached: int | None
    n_tokens: int

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events with text."""
        return [after - before for before, after in itertools.pairwise(self.times)]


@attrs.frozen(kw_only=True)
class Server:
    """A server to measure.

    Attributes:
        name: in tables.
        client: sends requests to it.
        model: the name of its model.
        per_word: tokens of a word, and `fixed` those that every prompt has beside its words.
        seed: begins the seed of each prompt, so that no other server and no other run has it.
    """

    name: str
    client: ServerClient
    model: str
    seed: str
    per_word: float = 1.0
    fixed: float = 0.0

    def prompt(self, n_tokens: int, seed: str) -> str:
        """Make a prompt of about that many tokens, the same for the same seed."""
        count = max(1, round((n_tokens - self.fixed) / self.per_word))
        return words(count, f"{self.seed} {seed}")

    async def complete(self, prompt: str, n_tokens: int) -> Answer:
        """Continue a prompt by that many tokens, greedily.

        Raises:
            TrioServeError: the server answers with an error, or without its usage.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        sent, times, usage = trio.current_time(), [], None
        async with self.client.events("/v1/completions", body, form=AnswerEvent) as events:
            async for event in events:
                if any(choice.text for choice in event.choices):
                    times.append(trio.current_time())
                usage = event.usage or usage
        if usage is None or not times:
            missing = "the number of tokens" if usage is None else "text"
            raise UnavailableError(f"An answer of {self.name} has come without {missing}.")
        details = usage.prompt_tokens_details
        return Answer(
            sent=sent,
            times=times,
            n_prompt=usage.prompt_tokens,
            n_cached=None if details is None else details.cached_tokens,
            n_tokens=usage.completion_tokens,
        )

    async def calibrated(self) -> Server:
        """Find how many tokens a word has. Raises as `complete`."""
        few, many = [
            (await self.complete(words(n, f"{self.seed} {n} words"), 2)).n_prompt
            for n in (_FEW, _MANY)
        ]
        per_word = (many - few) / (_MANY - _FEW)
        if per_word <= 0:
            raise UnavailableError(f"{self.name} counts the tokens of prompts wrongly.")
        return attrs.evolve(self, per_word=per_word, fixed=max(0.0, few - _FEW * per_word))
