"""Greetings, thanks, and a few common questions."""

from __future__ import annotations

from random import Random

from examples.bundled_model.document import Turn
from examples.bundled_model.words import table

_WORDS = table("small_talk")

WHO: str = _WORDS["who"]
SMALL_TALK: list[list[str]] = _WORDS["small_talk"]


def small_talk(rng: Random) -> Turn:
    """Greet, thank, chat."""
    weights = [4 if index < 12 else 1 for index in range(len(SMALL_TALK))]
    asks, answers = rng.choices(SMALL_TALK, weights)[0]
    choices = tuple(answers.split("|"))
    ask = rng.choice(asks.split("|"))
    thought = f"The user says: {ask} I answer kindly."
    return Turn("small talk", ask, rng.choice(choices), key="", thought=thought, accept=choices)
