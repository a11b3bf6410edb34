"""The code between the ears and the language model: which embeddings tell what was said.

As with the eyes, the code is learned first, without sound: one embedding for each digit and
one for a token in which no digit ends, strewn as the ears strew them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from examples.bundled_model import frozen
from examples.bundled_model.model import Llama
from examples.bundled_model.sound.encoder import PER_CHUNK
from examples.bundled_model.sound.questions import AROUND, conversation

BLANK = 10
BATCH = 32


class SoundCode(nn.Module):
    """A table of embeddings: ten digits and the blank, and what the place in a second adds."""

    def __init__(self, text_width: int = 192) -> None:
        super().__init__()
        self.labels = nn.Parameter(torch.zeros(11, text_width))
        self.places = nn.Parameter(torch.zeros(PER_CHUNK, text_width))

    @torch.no_grad()
    def begin_as_words(self, model: Llama, words: frozen.Conversations) -> None:
        """Write digits and spaces in the language model's own embeddings."""
        for digit in range(10):
            self.labels[digit] = model.embedding[words.ids(str(digit))[0]]
        self.labels[BLANK] = model.embedding[words.ids(" ")[0]]

    def forward(self, labels: Sequence[int]) -> Tensor:
        """Return (tokens, text width)."""
        places = self.places.repeat(len(labels) // PER_CHUNK, 1)
        return self.labels[list(labels)] + places


def strew(rng: Random, digits: Sequence[int]) -> list[int]:
    """Put digits into time as speech does, each at one token."""
    labels = [BLANK] * rng.randint(2, 10)
    pace = rng.uniform(3.2, 7)
    for digit in digits:
        labels += [digit, *[BLANK] * max(2, round(rng.gauss(pace, 1.3) - 1))]
    labels += [BLANK] * rng.randint(0, 8)
    return labels + [BLANK] * (-len(labels) % PER_CHUNK)


def some_digits(rng: Random, most: int) -> tuple[int, ...]:
    """Think of digits."""
    return tuple(rng.randint(0, 9) for _ in range(rng.randint(1, most)))


def rows(
    rng: Random, words: frozen.Conversations, said: Sequence[tuple[int, ...]], tokens: Sequence[int]
) -> list[frozen.Row]:
    """Return conversations about the digits in `said`, each in its number of `tokens`."""
    return [
        words.row(conversation(rng, digits), count, AROUND, thinking=rng.random() < frozen.THINKING)
        for digits, count in zip(said, tokens, strict=True)
    ]


def train(code: SoundCode, model: Llama, words: frozen.Conversations, minutes: float) -> None:
    """Improve the code through the language model until the time is up."""
    rng = Random(0)

    def ask() -> tuple[list[frozen.Row], list[Tensor]]:
        said = [some_digits(rng, 5) for _ in range(BATCH)]
        shown = [code(strew(rng, digits)) for digits in said]
        return rows(rng, words, said, [len(one) for one in shown]), shown

    frozen.improve(code, model, ask, minutes)


def main() -> None:
    """Find out what the language model has to be shown."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, words, code = frozen.load(), frozen.Conversations(), SoundCode()
    if options.resume:
        code.load_state_dict(torch.load(options.resume))
    else:
        code.begin_as_words(model, words)
    train(code, model, words, options.minutes)
    torch.save(code.state_dict(), options.output)
    rng = Random(1)
    for count in range(1, 6):
        said = [tuple(rng.randint(0, 9) for _ in range(count)) for _ in range(100)]
        shown = [code(strew(rng, digits)) for digits in said]
        with torch.no_grad():
            asked = rows(rng, words, said, [len(one) for one in shown])
            print(f"{count} digits: {frozen.loss(model, asked, shown)[1]:.2f}")


if __name__ == "__main__":
    main()
