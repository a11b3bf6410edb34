"""Clients that ask for streams and for whole answers, and leave some of them; what they get."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import attrs
import httpx
import trio

from tests.ray_cluster.forms import FORMS, Form

#: Tokens of an answer: half a second or so, on a server that has nothing else to do.
_N_TOKENS = 400

#: Seconds after which an answer does not come any more.
_TIMEOUT = 60.0

#: The shares of clients that leave, and that want a stream.
_LEAVE, _STREAM = 0.2, 0.6

_WORDS = ("sea", "night", "bread", "winter", "garden", "river", "stone", "letter", "market")


@attrs.define(kw_only=True)
class Answer:
    """The outcome of a request.

    Attributes:
        status: that of HTTP; 0 until there is one.
        outcome: ``done``; ``left`` by us; ``error``, as the last event of a stream; ``cut``, when a
            stream ended without one; ``refused``, when it had not begun.
        why: what was wrong.
    """

    form: str
    stream: bool
    sent: float
    ended: float = 0.0
    status: int = 0
    outcome: str = ""
    why: str = ""


@attrs.define
class Load:
    """Requests of a number of clients to models, until `stop` is called."""

    url: str
    models: Sequence[str]
    n_clients: int = 6
    answers: list[Answer] = attrs.field(factory=list)
    _stopped: bool = False

    def stop(self) -> None:
        """Send no more requests; those that were sent get their answers."""
        self._stopped = True

    def count(self, since: float = 0.0) -> Counter[str]:
        """Count the outcomes of the requests sent since then."""
        return Counter(one.outcome for one in self.answers if one.sent >= since)

    def faults(self) -> list[str]:
        """The requests that neither were done nor left, as text for a report."""
        kinds = {False: "whole", True: "stream"}
        return [
            f"{one.form}, {kinds[one.stream]}: {one.outcome} ({one.status}): {one.why[-300:]}"
            for one in self.answers
            if one.outcome not in ("done", "left")
        ]

    async def run_client(self, seed: int) -> None:
        """Send one request after the other."""
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=_TIMEOUT) as client:
            while not self._stopped:
                form, model = rng.choice(FORMS), rng.choice(self.models)
                stream = rng.random() < _STREAM
                answer = Answer(form=form.name, stream=stream, sent=monotonic())
                patience = rng.uniform(0.02, 1.5) if rng.random() < _LEAVE else None
                body = form.write(model, " ".join(rng.choices(_WORDS, k=12)), _N_TOKENS)
                with trio.move_on_after(patience or 2 * _TIMEOUT) as scope:
                    await _exchange(client, form, {**body, "stream": stream}, answer)
                if scope.cancelled_caught:
                    answer.outcome = "left" if patience else "hung"
                answer.ended = monotonic()
                self.answers.append(answer)


async def _exchange(
    client: httpx.AsyncClient, form: Form, body: dict[str, object], answer: Answer
) -> None:
    """Send a request, and note what comes."""
    parts: list[str] = []
    try:
        async with client.stream("POST", form.path, json=body) as response:
            answer.status = response.status_code
            async for part in response.aiter_text():
                parts.append(part)
    except httpx.TransportError as error:
        answer.outcome = "cut" if answer.status == 200 else "refused"
        answer.why = f"{''.join(parts)[-200:]} {error!r}"
        return
    text = "".join(parts)
    if answer.status != 200:
        answer.outcome, answer.why = "refused", text
        return
    answer.outcome = form.judge(text) if answer.stream else "done"
    if answer.outcome != "done":
        answer.why = text


@asynccontextmanager
async def loaded(url: str, models: Sequence[str], n_clients: int = 6) -> AsyncIterator[Load]:
    """Load an address during the block. At its end, all requests that were sent have an end."""
    load = Load(url, models, n_clients)
    async with trio.open_nursery() as nursery:
        for seed in range(n_clients):
            nursery.start_soon(load.run_client, seed)
        yield load
        load.stop()
