"""Where in a prompt checkpoints are worth their RAM.

Memory that cannot be cut (sliding windows, recurrent and hybrid models) can only go back to where
its state was kept. A prompt is prefilled up to each of these places, and the state is kept there.
"""

from __future__ import annotations

from bisect import bisect_right, insort

import attrs

#: The last tokens of a prompt may be others next time, even where the text goes on from there:
#: its last word may become longer.
UNCERTAIN_END = 4


@attrs.frozen
class CheckpointRules:
    """How many checkpoints there may be, and where.

    Nothing is kept where memory can be cut.
    """

    #: For each slot, on average.
    per_slot: int = 32
    #: A long prompt has one after each so many cells, besides those at places that are known to be
    #: good; 0: only those.
    step: int = 8192
    #: Two places that are at most so many cells apart are as good as one.
    min_gap: int = 16


DEFAULT_RULES = CheckpointRules()


def places_of(n_prompt: int, hints: tuple[int, ...], rules: CheckpointRules) -> list[int]:
    """Choose where the prefill of a prompt stops for a checkpoint, in ascending order.

    ::

        | system prompt, tools | older messages | last message | begin of the answer |
                               ^                ^              ^
                           the places that another prompt parts at: `hints`

    A place that is close to the beginning or to one before it is left out. Then come places that
    may be of use whatever the text is.
    """
    places = [0]
    for place in sorted(hints):
        if places[-1] + rules.min_gap < place < n_prompt:
            places.append(place)
    others = [n_prompt - UNCERTAIN_END]
    if rules.step:
        others += range(rules.step, n_prompt, rules.step)
    for place in others:
        if place > 0 and all(abs(place - other) > rules.min_gap for other in places):
            insort(places, place)
    return places[1:]


def meet(places: list[int], shared: int, rules: CheckpointRules) -> int:
    """Find the place where a prompt that shares so much parts; makes one if there is none.

    One that is made takes the place of those soon after it.
    """
    i = bisect_right(places, shared)
    if i and shared - places[i - 1] <= rules.min_gap:
        return places[i - 1]
    places[i:] = [shared, *(place for place in places[i:] if place > shared + rules.min_gap)]
    return shared


def next_place(places: list[int], n_held: int) -> int | None:
    """Find the first place that lies ahead; None: there is none."""
    i = bisect_right(places, n_held)
    return places[i] if i < len(places) else None
