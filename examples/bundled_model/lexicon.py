"""The words that the corpus is built from, and random names, words and strings."""

from __future__ import annotations

import re
import string
from random import Random

from examples.bundled_model.words import table

_WORDS = table("lexicon")


NOUNS: list[str] = _WORDS["nouns"]
ADJECTIVES: list[str] = _WORDS["adjectives"]
VERBS: list[str] = _WORDS["verbs"]
OTHER: list[str] = _WORDS["other"]
ANIMALS: list[str] = _WORDS["animals"]
COLORS: list[str] = _WORDS["colors"]
NAMES: list[str] = _WORDS["names"]
SURNAMES: list[str] = _WORDS["surnames"]
CITIES: list[str] = _WORDS["cities"]
HOBBIES: list[str] = _WORDS["hobbies"]
FOODS: list[str] = _WORDS["foods"]
EMOJI: list[str] = _WORDS["emoji"]
FOREIGN: list[str] = _WORDS["foreign"]
CODE: list[str] = _WORDS["code"]
COMMON: list[str] = _WORDS["common"]
CONSONANTS = "bcdfghjklmnprstvwz"
SYLLABLE_ENDS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "x"]


def pseudo_word(rng: Random, low: int = 2, high: int = 4) -> str:
    """Return a word that does not exist, such as ``varokin``."""
    parts = [
        rng.choice(CONSONANTS) + rng.choice("aeiouy") + rng.choice(SYLLABLE_ENDS)
        for _ in range(rng.randint(low, high))
    ]
    return "".join(parts)


def letters(rng: Random, low: int = 3, high: int = 10) -> str:
    """Return random letters and digits, as in a password or an identifier."""
    alphabet = rng.choice(
        [
            string.ascii_lowercase,
            string.ascii_uppercase,
            string.ascii_letters,
            string.ascii_letters + string.digits,
            "0123456789abcdef",
            string.ascii_uppercase + string.digits + "-",
        ]
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))


def word(rng: Random) -> str:
    """Return a common English word."""
    return rng.choice(rng.choice((NOUNS, NOUNS, ADJECTIVES, VERBS, OTHER)))


def first_name(rng: Random) -> str:
    """Return a first name; one in three does not exist."""
    return rng.choice(NAMES) if rng.random() < 0.65 else pseudo_word(rng, 2, 3).capitalize()


def full_name(rng: Random) -> str:
    """Return a first name, sometimes with a surname."""
    name = first_name(rng)
    if rng.random() < 0.3:
        name += " " + (
            rng.choice(SURNAMES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
        )
    return name


def city(rng: Random) -> str:
    """Return a city; one in three does not exist."""
    return rng.choice(CITIES) if rng.random() < 0.65 else pseudo_word(rng, 2, 3).capitalize()


def number(rng: Random) -> int:
    """Return a whole number, mostly a short one."""
    return rng.randint(0, 10 ** rng.choice((1, 2, 2, 3, 4, 6)) - 1)


def numeral(rng: Random) -> str:
    """Return a number as text: whole, with decimals, a date or a time."""
    match rng.randint(0, 5):
        case 0:
            return f"{number(rng)}.{rng.randint(0, 99)}"
        case 1:
            return f"{rng.randint(1900, 2099)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        case 2:
            return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
        case _:
            return str(number(rng))


def sentence(rng: Random) -> str:
    """Return a short plain sentence."""
    adjective, noun, other = rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(NOUNS)
    name, verb = first_name(rng), rng.choice(VERBS)
    forms = (
        f"The {adjective} {noun} {verb} near the {other}.",
        f"{name} {verb} in {city(rng)}.",
        f"The {noun} of {name} is {adjective}.",
        f"{name} bought {rng.randint(2, 99)} {adjective} {noun}s.",
        f"A {noun} and a {other} are in the {rng.choice(NOUNS)}.",
        f"I saw a {adjective} {noun} today!",
        f"Where is the {adjective} {noun}?",
        f"My {noun} has number {number(rng)}.",
        f"{name} likes {rng.choice(FOODS)} and {rng.choice(HOBBIES)}.",
    )
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", rng.choice(forms))


def token_like(rng: Random) -> str:
    """Return something that cannot be guessed: pseudo-word, letters, number, emoji, code."""
    roll = rng.random()
    if roll < 0.35:
        return pseudo_word(rng)
    if roll < 0.55:
        return letters(rng)
    if roll < 0.75:
        return numeral(rng)
    if roll < 0.85:
        return rng.choice(EMOJI)
    if roll < 0.93:
        return rng.choice(FOREIGN)
    return rng.choice(CODE)


def phrase(rng: Random) -> str:
    """Return text to copy: words, a sentence, or things that cannot be guessed."""
    roll = rng.random()
    if roll < 0.05:
        text = rng.choice(COMMON)
    elif roll < 0.34:
        text = " ".join(word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5, 7))))
    elif roll < 0.5:
        text = " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    elif roll < 0.6:
        text = full_name(rng)
    elif roll < 0.8:
        text = " ".join(token_like(rng) for _ in range(rng.choice((1, 1, 2, 3, 4))))
    else:
        mixed = (token_like, word, word)
        text = " ".join(rng.choice(mixed)(rng) for _ in range(rng.choice((2, 3, 4, 6))))
    style = rng.random()
    if style < 0.12:
        text = text.capitalize() + rng.choice(("", ".", "!", "?"))
    elif style < 0.16:
        text = text.upper()
    elif style < 0.2:
        text = text.title()
    elif style < 0.25:
        text = text.replace(" ", ", ")
    return text
