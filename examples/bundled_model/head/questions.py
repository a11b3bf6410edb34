"""Questions for the model whose output a head learns from: endless, from a seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from random import Random

from examples.bundled_model.corpus import documents
from examples.bundled_model.words import table

_WORDS = table("head.questions")


def _split(text: str) -> list[str]:
    """Return the parts between bars."""
    return text.split("|")


TOPICS: list[str] = _WORDS["topics"]
PEOPLE: list[str] = _WORDS["people"]
PLACES: list[str] = _WORDS["places"]
TASKS: list[str] = _WORDS["tasks"]
FORMS: list[str] = _WORDS["forms"]


def general(seed: int) -> Iterator[str]:
    """Yield questions that any chat model may get."""
    rng = Random(seed)
    while True:
        values = {
            "topic": rng.choice(TOPICS),
            "other": rng.choice(TOPICS),
            "person": rng.choice(PEOPLE),
            "person2": rng.choice(PEOPLE),
            "place": rng.choice(PLACES),
            "task": rng.choice(TASKS),
        }
        yield rng.choice(FORMS).format(**values)


def of_corpus(seed: int, *, held_out: bool = False) -> Iterator[str]:
    """Yield first questions of the conversations that the bundled model learned from, or others."""
    for document in documents(seed, held_out=held_out):
        for message in document.messages or ():
            if message["role"] == "user" and isinstance(message["content"], str):
                yield message["content"]
                break


def main() -> None:
    """Print questions that no head has learned from, one a line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bundled", action="store_true", help="those for the bundled model")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1_000_000)
    options = parser.parse_args()
    stream = of_corpus(options.seed, held_out=True) if options.bundled else general(options.seed)
    lines = (line for line in stream if "\n" not in line)
    print("\n".join(islice(lines, options.count)))


if __name__ == "__main__":
    main()
