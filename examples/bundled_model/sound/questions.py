"""Questions about a recording, and the answers."""

from __future__ import annotations

from random import Random

from examples.bundled_model.media import MARK
from examples.bundled_model.words import table

_WORDS = table("sound.questions")

#: The text of libmtmd around a recording, for the projector type ``qwen3a``. The language
#: model has no such tokens: it reads them as words, letter by letter.
AROUND = ("<|audio_start|>", "<|audio_end|>")
#: A server's question for a transcript, before the recording: nearly half of the questions.
TRANSCRIBE = "Transcribe audio to text"
ASK: list[str] = _WORDS["ask"]
LANGUAGES = ("en", "english", "English")


def answer(digits: tuple[int, ...]) -> str:
    """Return the right answer."""
    return " ".join(map(str, digits))


def conversation(rng: Random, digits: tuple[int, ...]) -> list[tuple[str, str]]:
    """Ask one question."""
    if rng.random() < 0.45:
        language = f" (language: {rng.choice(LANGUAGES)})" if rng.random() < 0.2 else ""
        question = f"{TRANSCRIBE}{language}{MARK}"
    else:
        asked = rng.choice(ASK)
        question = MARK + asked if rng.random() < 0.5 else asked + MARK
    return [(question, answer(digits))]
