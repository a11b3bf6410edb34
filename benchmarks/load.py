"""Loads of plain streams, rounds that take turns, and what the command lines have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import attrs

from benchmarks.driver import MAX_CLIENTS, run
from benchmarks.plan import Plan
from benchmarks.stats import Sample, sample_of
from benchmarks.targets import Target, TargetError
from benchmarks.wire import Shape
from trioserve.bench.prompts import words


@attrs.frozen(kw_only=True)
class Load:
    """One kind of load: how many clients, what they send, and for how long at most."""

    clients: int
    requests: int = 1  # for each client
    prompt_words: int = 32
    shape: Shape = attrs.field(factory=Shape)
    keep_alive: bool = True
    timeout: float = 120.0
    max_time: float = 600.0

    def plans(self, seed: str) -> list[Plan]:
        """Make the plans of one round. The same seed makes the same prompts."""
        return [
            Plan(
                requests=[
                    self.shape.request(words(self.prompt_words, f"{seed} {client} {number}"))
                    for number in range(self.requests)
                ]
            )
            for client in range(self.clients)
        ]

    def measure(self, target: Target, seed: str) -> Sample:
        """Run one round against one server."""
        result = run(
            target.address,
            self.plans(seed),
            keep_alive=self.keep_alive,
            timeout=self.timeout,
            max_time=self.max_time,
        )
        return sample_of(
            result,
            planned=self.clients * self.requests,
            expected_tokens=self.shape.max_tokens if self.shape.ignore_eos else 0,
        )


def warm_up(targets: Sequence[Target], measure: Callable[[Target, str], Sample]) -> None:
    """Measure each server once, for nothing.

    Raises:
        TargetError: a request failed, so measuring makes no sense.
    """
    for target in targets:
        sample = measure(target, "warm-up")
        if sample.failed:
            raise TargetError(f"{target.name}: warm-up failed: {'; '.join(sample.errors)}")


def interleave(
    targets: Sequence[Target],
    rounds: int,
    measure: Callable[[Target, str], Sample],
    label: str,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Sample]]:
    """Measure A B A B, the order turned round every other time, and return samples by name.

    A round has the same seed for every server, so all get the same prompts.
    """
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    for number in range(rounds):
        order = list(targets) if number % 2 == 0 else list(reversed(targets))
        for target in order:
            sample = measure(target, f"{label} round {number}")
            samples[target.name].append(sample)
            note(f"{label}, round {number + 1} of {rounds}: {target.name}")
    return samples


def bounded(low: int, high: int) -> Callable[[str], int]:
    """Make a type for argparse: an integer between the two, both included."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return convert


def counts(text: str) -> list[int]:
    """Read numbers of clients such as ``1,5,10``."""
    return [bounded(1, MAX_CLIENTS)(part) for part in text.split(",")]


def seconds(text: str) -> float:
    """Read a time limit: more than 0 and at most an hour."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600")
    return value


def progress(quiet: bool) -> Callable[[str], None]:
    """Make the function that reports progress."""

    def note(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return note
