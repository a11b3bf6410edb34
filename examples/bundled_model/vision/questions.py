"""Questions about a drawing, and the answers."""

from __future__ import annotations

from random import Random

from examples.bundled_model.media import MARK
from examples.bundled_model.vision.paint import Picture
from examples.bundled_model.words import table

_WORDS = table("vision.questions")

ASK: dict[str, list[str]] = _WORDS["ask"]


def kinds(picture: Picture) -> tuple[str, ...]:
    """Return what can be asked about a picture."""
    if picture.shape is None:
        return ("color", "digit", "describe")
    return ("color", "shape", "count", "describe")


def answer(kind: str, picture: Picture) -> str:
    """Return the right answer."""
    match kind:
        case "color":
            return f"The color is {picture.color}."
        case "shape":
            return f"The shape is a {picture.shape}."
        case "count" | "digit":
            return f"The number is {picture.number}."
    if picture.shape is None:
        return f"I see the number {picture.number}."
    ending = "s" if picture.number > 1 else ""
    ending = "es" if ending and picture.shape == "cross" else ending
    return f"I see {picture.number} {picture.color} {picture.shape}{ending}."


def conversation(rng: Random, picture: Picture, most: int = 3) -> list[tuple[str, str]]:
    """Ask one to ``most`` questions; the picture stands before or behind the first one."""
    chosen = list(kinds(picture))
    rng.shuffle(chosen)
    turns = [
        (_casual(rng, rng.choice(ASK[kind])), answer(kind, picture))
        for kind in chosen[: rng.randint(1, most)]
    ]
    first, reply = turns[0]
    turns[0] = (MARK + first if rng.random() < 0.5 else first + MARK, reply)
    return turns


def _casual(rng: Random, question: str) -> str:
    """Now and then write in lower case, or without the mark at the end."""
    roll = rng.random()
    if roll < 0.08:
        return question.lower()
    return question.rstrip("?.") if roll < 0.16 else question
