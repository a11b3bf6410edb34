"""A model of llama.cpp that speaks, loaded beside the bundled one as its files are configured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.speech_models import write_pocket
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.models import BUNDLED
from trioserve.server import Server

FAST = {"threads": 1, "ctx_size": 512, "trial_load": False, "mmproj_auto": False}


async def test_the_model_that_is_named_speaks(tmp_path: Path) -> None:
    pair = write_pocket(tmp_path)
    # Its projector is beside it.
    async with Server(Config(tts=str(pair.model), **FAST)) as server:
        first = await server.speak("Hello there.", seed=1)
        again = await server.speak("Hello there.", seed=1)
        assert first.n_frames > 0 and np.array_equal(first.samples, again.samples)
        assert len((await server.embed("a")).vectors) == 1  # of the model that writes
        answer = await server.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
        assert answer.tokens


async def test_what_cannot_speak_is_refused_at_start(tmp_path: Path) -> None:
    for fields, message in (
        ({"tts": str(BUNDLED), "tts_mmproj": str(tmp_path / "x.gguf")}, "No such file|does not sp"),
        ({"tts": str(tmp_path / "x.gguf")}, "No such file"),
        ({"tts": str(tmp_path)}, "is a directory"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            async with Server(Config(**fields, **FAST)):
                pass
