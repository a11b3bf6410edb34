"""How many messages there may be in a second."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trioserve.tools.mcp.messages import Pace


async def test_a_pace(autojump_clock: trio.testing.MockClock) -> None:
    pace, start = Pace(10), trio.current_time()
    for _ in range(10):
        await pace.step()
    assert trio.current_time() == start
    for _ in range(10):
        await pace.step()
    assert trio.current_time() - start == pytest.approx(1)
    await trio.sleep(100)  # what was not used is not saved for later
    for _ in range(30):
        await pace.step()
    assert trio.current_time() - start == pytest.approx(103)
