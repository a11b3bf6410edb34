"""The bundled voice says what the bundled model understands."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from trioserve import Config, Server
from trioserve.models.speech import BUNDLED_VOICE

pytestmark = pytest.mark.system

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    tts, tts_mmproj = str(BUNDLED_VOICE.model), str(BUNDLED_VOICE.projector)
    config = Config(threads=1, ctx_size=2048, parallel=2, tts=tts, tts_mmproj=tts_mmproj)
    async with Server(config) as server:
        yield server


async def test_its_digits_are_understood(server: Server) -> None:
    misheard = []
    for digit, word in enumerate(WORDS):
        for text in (word, str(digit)):
            speech = await server.speak(text, seed=digit)
            transcript = await server.transcribe(speech.encoded(), temperature=0)
            if transcript.text != str(digit):
                misheard.append((text, transcript.text))
    assert len(misheard) <= 2, misheard


async def test_a_seed_changes_little(server: Server) -> None:
    first, *others = [(await server.speak("seven", seed=seed)).samples for seed in range(3)]
    for other in others:
        assert len(other) == len(first)
        assert np.abs(other - first).max() > 0
        assert np.corrcoef(other, first)[0, 1] > 0.9


@pytest.mark.parametrize("text", ["Blorptwixing!", "Naïve café", "*a* _b_ {c}", "7" * 40, "…"])
async def test_what_it_does_not_know_is_some_sound(server: Server, text: str) -> None:
    speech = await server.speak(text)
    assert 0 < speech.seconds < 60
    assert np.isfinite(speech.samples).all()


def test_it_is_small() -> None:
    files = (BUNDLED_VOICE.model, BUNDLED_VOICE.projector)
    assert sum(file.stat().st_size for file in files) < 2_000_000
