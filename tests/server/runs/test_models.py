"""The bundled model, and media in runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.support.media_files import image_file
from tests.support.projectors import WordProjector
from tests.support.scripted_server import assert_at_rest, serve
from tests.support.tool_calls import FakeTool, calls, saying
from trioserve import Config, Image, Server


async def get_weather(city: str) -> dict[str, object]:
    """Tell the current weather in a city."""
    await trio.lowlevel.checkpoint()
    return {"temperature": 21, "condition": "sunny"}


async def test_the_bundled_model_asks_for_the_weather_and_answers() -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    async with Server(Config(threads=1, ctx_size=2048, parallel=2)) as server:
        answer = await server.run(question, [get_weather], temperature=0)
    assert answer.reason == "answer"
    assert answer.message.content == "The temperature is 21 and the condition is sunny."
    assert [one["role"] for one in answer.messages] == ["assistant", "tool", "assistant"]
    # All that the first step has read and written is there already, but for its last tokens.
    last, all_of_them = answer.finished.timings, answer.timings
    read_and_written = (all_of_them.prompt_n - last.prompt_n) + (
        all_of_them.predicted_n - last.predicted_n
    )
    assert read_and_written - 4 <= last.cache_n <= read_and_written


@pytest.mark.system
async def test_a_file_is_loaded_once_for_all_steps(tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    picture.write_bytes(image_file(size=(8, 4)))

    async def remove() -> str:
        await trio.Path(picture).unlink()
        return "removed"

    backend, prompts = saying([calls(("remove", {})), "Done."], projector=WordProjector())
    content = [{"type": "text", "text": "What is it?"}, Image(picture)]
    async with serve(backend) as server:
        answer = await server.run([{"role": "user", "content": content}], [remove, FakeTool()])
        await assert_at_rest(server)
        assert server.memory.n_held == 0
    assert answer.message.content == "Done."
    assert [prompt.count("(image 8x4)") for prompt in prompts] == [1, 1]
    assert answer.finished.timings.cache_n > 100
