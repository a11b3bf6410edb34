"""The timings of a stream that still runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.support.clients import client_of, events_in, named_events_in
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.output import LiveTimings
from trioserve.engine import DraftRequest
from trioserve.engine.step_costs import StepCosts
from trioserve.testing import ScriptedBackend
from trioserve.types import TokenId

SAID = "ab" * 30


class Guesser:
    """Drafts a and b in turn."""

    name = "guesser"
    step_s = 0.0
    n_max = 8
    is_free = True

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[TokenId]]:
        return [
            tuple((b"ba" if one.keys[-1] == ord("a") else b"ab") * 4)[: one.n_max]
            for one in requests
        ]

    def forget(self, slot_id: int) -> None:
        """It remembers nothing."""

    def close(self) -> None:
        """It holds nothing."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_live_timings_count_drafts(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "seconds", lambda costs, n_rows: 1.0)
    backend = ScriptedBackend(script=lambda prompt: SAID, drafters=[Guesser()])
    more = {"stream": True, "timings_per_token": True}
    async with client_of(backend) as client:
        answer = await client.post(path, json=body | more)
    read = named_events_in if path == "/v1/responses" else partial(events_in, done="/v1/" in path)
    events = read(answer.text)
    *live, last = [each["timings"] for each in events if "timings" in each]
    told = [each["draft_n"] for each in live if "draft_n" in each]
    assert told and told == sorted(told)
    assert 0 < told[-1] <= last["draft_n"]
    assert all(each["draft_n_accepted"] <= each["draft_n"] for each in live if "draft_n" in each)
    assert last["draft_n_accepted"] > 0


def test_a_chunk_without_a_draft_takes_nothing_back() -> None:
    live = LiveTimings(3, GenerationRequest(timings_per_token=True))
    live.on_output(4, (3, 2))
    live.on_output(1, (0, 0))
    timings = live.now()["timings"]
    assert (timings.predicted_n, timings.draft_n, timings.draft_n_accepted) == (5, 3, 2)
