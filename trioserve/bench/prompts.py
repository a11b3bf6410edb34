"""Prompts of words that mean nothing, which no server has seen before."""

from __future__ import annotations

import itertools
import random

_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
#: Syllables, in the order of `benchmarks.gguf_maker`, in whose models a word of two is one token.
SYLLABLES = tuple(c + v for c, v in itertools.product(_CONSONANTS, _VOWELS))


def words(count: int, seed: str) -> str:
    """Return that many words of two syllables, the same for the same seed.

    Two seeds differ from the first words on, so that no prefix of one is in the cache of the other.
    """
    rng = random.Random(seed)
    return " ".join(rng.choice(SYLLABLES) + rng.choice(SYLLABLES) for _ in range(count))
