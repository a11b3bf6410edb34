"""How outputs are written: the timings of a stream that still runs, and arguments cut short."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jiter
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.clients import client_of, events_in, named_events_in
from tests.support.json_values import JSON
from trioserve.api.base.cut_json import read_arguments
from trioserve.api.base.timings import LiveTimings
from trioserve.engine import DraftRequest
from trioserve.engine.step_costs import StepCosts
from trioserve.testing import ScriptedBackend
from trioserve.types import TokenId

SAID = "ab" * 30


class Guesser:
    """Goes on with a text of a and b in turn."""

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
    live = LiveTimings(3, lambda: 0.0)
    live.on_output(4, (3, 2))
    live.on_output(1, (0, 0))
    timings = live.now()
    assert (timings.predicted_n, timings.draft_n, timings.draft_n_accepted) == (5, 3, 2)


# -- arguments of a call, whole and cut short


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), JSON), st.data())
def test_arguments_cut_short_are_read_as_the_sdk_reads_them(
    value: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    assert read_arguments(text) == value
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert read_arguments(cut) == jiter.from_json(cut.encode(), partial_mode=True)


def test_arguments_with_a_number_too_long_for_python() -> None:
    assert read_arguments('{"n": ' + "1" * 5000 + "}") == {"n": "1" * 5000}
    assert read_arguments("") == {}
