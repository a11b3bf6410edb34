"""A run with a real model: what its second step prefills."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import trio

from tests.support.measured import Report
from trioserve.config import Config
from trioserve.server import Server

pytestmark = pytest.mark.system

QUESTION = [{"role": "user", "content": "What is the weather in Paris, and in Rome?"}]


async def get_weather(city: Literal["Paris", "Rome"]) -> dict[str, object]:
    """Tell the current weather in a city."""
    await trio.lowlevel.checkpoint()
    return {"city": city, "temperature": 21, "condition": "sunny"}


async def test_a_step_prefills_what_is_new(gemma: Path, report: Report) -> None:
    """The model has to call, as it has not learnt to; the answer is what it makes of that."""
    config = Config(model=str(gemma), threads=1, ctx_size=4096)
    async with Server(config) as server:
        settings = {"tool_choice": "required", "temperature": 0, "max_tokens": 60, "max_steps": 2}
        answer = await server.run(QUESTION, [get_weather], parallel_tool_calls=False, **settings)
    last = answer.finished.timings
    n_first = answer.timings.prompt_n - last.prompt_n
    report(
        f"run: the first step had {n_first} tokens of prompt, and the second {len(answer.prompt)}, "
        f"of which {last.cache_n} were cached and {last.prompt_n} prefilled"
    )
    assert answer.steps == 2
    assert last.cache_n >= 0.9 * n_first
