"""Candidates: numbers that look like objects."""

from __future__ import annotations

import math

from trioserve.types import Candidates, TokenProb

PIECES = {3: b"c", 1: b"a"}


def test_they_are_made_when_they_are_looked_at() -> None:
    candidates = Candidates([3, 1], [-0.5, -math.inf], PIECES.__getitem__)
    objects = (TokenProb(3, b"c", -0.5), TokenProb(1, b"a", -math.inf))
    assert len(candidates) == 2 and tuple(candidates) == objects
    assert candidates == objects == Candidates.of(*objects)
    assert hash(candidates) == hash(Candidates.of(*objects))
    assert candidates[0] == objects[0] and candidates[-1] == objects[1]
    assert candidates[:1] == objects[:1] and candidates[:None] == objects
    assert candidates != objects[:1] and candidates != 5
    assert repr(candidates[:1]) == f"Candidates([{objects[0]!r}])"


def test_other_names() -> None:
    candidates = Candidates([3], [0.0], PIECES.__getitem__)
    assert candidates.named(lambda token: b"<%d>" % token)[0].piece == b"<3>"
    assert candidates[0].piece == b"c"
