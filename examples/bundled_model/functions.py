"""The functions that the corpus has tools for: known ones, and made-up ones."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.bundled_model import lexicon
from examples.bundled_model.words import table

Maker = Callable[[Random], Any]


@dataclass(frozen=True)
class Parameter:
    """One argument of a function, under one of several names."""

    names: tuple[str, ...]
    kind: str
    text: str
    make: Maker


@dataclass(frozen=True)
class Function:
    """A function, how it may be called in the list, and what a user says to need it."""

    names: tuple[str, ...]
    text: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]


def _words(rng: Random) -> str:
    return " ".join(lexicon.word(rng) for _ in range(rng.randint(1, 3)))


def _email(rng: Random) -> str:
    return f"{lexicon.first_name(rng).lower()}@example.{rng.choice(('com', 'org', 'net'))}"


def _path(rng: Random) -> str:
    folder, ending = rng.choice(("", "/tmp/", "/home/", "src/")), rng.choice(("txt", "py", "md"))
    return f"{folder}{lexicon.word(rng)}.{ending}"


def _small(rng: Random) -> int:
    return rng.randint(1, 999)


def _expression(rng: Random) -> str:
    return f"{_small(rng)} {rng.choice('+-*/')} {_small(rng)}"


MAKERS: dict[str, Maker] = {
    "city": lexicon.city,
    "dice": lambda rng: rng.randint(1, 20),
    "email": _email,
    "expression": _expression,
    "food": lambda rng: rng.choice(lexicon.FOODS),
    "language": lambda rng: rng.choice(
        ("French", "German", "Spanish", "Italian", "Japanese", "Dutch")
    ),
    "path": _path,
    "small": _small,
    "symbol": lambda rng: "".join(
        rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, 4))
    ),
    "time": lambda rng: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
    "words": _words,
}


def _parameter(entry: dict[str, Any]) -> Parameter:
    make = MAKERS[entry["make"]]
    return Parameter(tuple(entry["names"]), entry["kind"], entry["text"], make)


def _function(entry: dict[str, Any]) -> Function:
    parameters = tuple(map(_parameter, entry["parameters"]))
    return Function(tuple(entry["names"]), entry["text"], parameters, tuple(entry["asks"]))


FUNCTIONS = tuple(map(_function, table("functions")))


def random_function(rng: Random) -> Function:
    """Make up a function, so that names have to be read and cannot be known."""
    noun = lexicon.pseudo_word(rng, 2, 3) if rng.random() < 0.5 else rng.choice(lexicon.NOUNS)
    verb = rng.choice(
        ("get", "find", "check", "open", "start", "stop", "update", "delete", "show", "count")
    )
    name = rng.choice(
        (f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}", f"{verb}-{noun}")
    )
    makers: tuple[tuple[str, Maker], ...] = (
        ("string", lexicon.pseudo_word),
        ("string", lexicon.first_name),
        ("string", lexicon.city),
        ("string", lexicon.word),
        ("integer", lexicon.number),
        ("string", lexicon.letters),
    )
    parameters = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2))):
        key = lexicon.pseudo_word(rng, 1, 2) if rng.random() < 0.4 else rng.choice(lexicon.NOUNS)
        kind, make = rng.choice(makers)
        parameters.append(Parameter((key,), kind, f"The {key}", make))
    ask = f"{verb.capitalize()} the {noun}"
    if len(parameters) == 1:
        forms = (
            f"{ask} for {{0}}",
            f"{ask} of {{0}}",
            f"{ask} {{0}}",
            f"{ask} with {parameters[0].names[0]} {{0}}",
        )
        ask = rng.choice(forms)
    elif parameters:
        ask += f" with {parameters[0].names[0]} {{0}} and {parameters[1].names[0]} {{1}}"
    return Function((name,), f"{verb.capitalize()} the {noun}", tuple(parameters), (ask, ask + "."))
