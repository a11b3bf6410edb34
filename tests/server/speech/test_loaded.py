"""A server with tiny models that speak, in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.media_files import wav_file
from tests.support.speech_models import FRAME, SpeechPair, write_pocket, write_qwen
from trioserve.concurrency import all_of
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.models import BUNDLED
from trioserve.server import Server
from trioserve.server.speech.speech import SpeechParams

pytestmark = pytest.mark.system

WRITERS: list[Callable[[Path], SpeechPair]] = [write_pocket, write_qwen]


def serve(pair: SpeechPair, **more: Any) -> Server:
    fields: dict[str, Any] = {**pair.settings, "parallel": 2, "threads": 1, **more}
    return Server(Config(**fields))


@pytest.mark.parametrize("write", WRITERS)
async def test_texts_are_spoken_at_once_and_alone(
    tmp_path: Path, write: Callable[[Path], SpeechPair]
) -> None:
    voices = tmp_path / "voices"
    voices.mkdir()
    (voices / "anna.wav").write_bytes(wav_file(seconds=1.0))
    async with serve(write(tmp_path), tts_voices=str(voices)) as server:
        assert server.model.voices == ["anna", "default"]
        speak = partial(server.speak, "a b c. d e f.", seed=7)
        alone = await speak()
        assert alone.rate == 24_000 and len(alone.samples) >= alone.n_frames * FRAME - 1
        assert alone.n_frames > 0 and np.isfinite(alone.samples).all()
        anna = await speak(voice="anna")
        np.testing.assert_array_equal((await speak()).samples, alone.samples)
        assert not np.array_equal(anna.samples, alone.samples)
        together = await all_of([speak, partial(speak, voice="anna")])
        for one, expected in zip(together, (alone, anna), strict=True):
            # Later, roundings of batches of other shapes have added up.
            n = 8 * FRAME
            np.testing.assert_allclose(one.samples[:n], expected.samples[:n], atol=1e-2)
        async with server.speaking("a b c. " * 30, SpeechParams()) as stream:
            await anext(stream)
        np.testing.assert_array_equal((await speak()).samples, alone.samples)
        chat = await server.chat([{"role": "user", "content": "Hi"}], max_tokens=4)
        assert chat.finished.timings.predicted_n
        assert len((await server.embed("a")).vectors) == 1  # of the model that writes


async def test_a_bad_file_ends_the_start(tmp_path: Path) -> None:
    pair = write_pocket(tmp_path)
    pair.projector.write_bytes(pair.projector.read_bytes()[:-50_000])
    with pytest.raises(ModelLoadError):
        async with serve(pair):
            raise AssertionError("it has started")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tts": str(BUNDLED), "tts_mmproj": "x.gguf"}, "No such file|does not sp"),
        ({"tts": "x.gguf"}, "No such file"),
        ({"tts": "."}, "is a directory"),
    ],
)
async def test_what_cannot_speak_is_refused_at_start(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        async with Server(Config(**fields, trial_load=False, mmproj_auto=False)):
            pass
