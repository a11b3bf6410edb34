"""The code between the eyes and the language model: which embeddings tell what.

The language model was never taught to see, and it does not change. So the first thing to
learn is what it would have to be shown for a red circle, or for a seven, to answer right.
That needs no pictures: the code is a table of embeddings for every color, shape and number,
which begins as a caption in words (``color: red``) and is improved through the language
model. The eyes then learn to show just this.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from examples.bundled_model import frozen
from examples.bundled_model.media import MARK
from examples.bundled_model.model import Llama
from examples.bundled_model.vision.drawings import MOST, SHAPES
from examples.bundled_model.vision.encoder import EyesConfig
from examples.bundled_model.vision.paint import NAMES, Picture
from examples.bundled_model.vision.questions import ASK, answer, conversation, kinds

TOKENS = EyesConfig().tokens
#: The caption: words, and the places of what changes.
CAPTION = ("color:", "<color>", "\nshape:", "<shape>", "\nnumber:", "<number>")
LETTERS = 4
BATCH = 32
#: The share of conversations about two pictures.
PAIRS = 0.25


def numbers(shown: list[Picture]) -> dict[str, list[int]]:
    """Return the row of each table for these pictures."""
    return {
        "color": [NAMES.index(one.color) for one in shown],
        "shape": [SHAPES.index(one.shape) if one.shape else len(SHAPES) for one in shown],
        "number": [one.number for one in shown],
        "kind": [int(one.shape is None) for one in shown],
    }


class Code(nn.Module):
    """Tables whose sum is what the language model is shown."""

    def __init__(self, text_width: int = 192) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(TOKENS, text_width))
        sizes = {"color": len(NAMES), "shape": len(SHAPES) + 1, "number": 11, "kind": 2}
        self.tabs = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(size, TOKENS, text_width) * 0.004)
                for name, size in sizes.items()
            }
        )

    @torch.no_grad()
    def begin_as_caption(self, model: Llama, words: frozen.Conversations) -> None:
        """Write the caption in the language model's own embeddings."""
        embedding, place = model.embedding, 0
        space = embedding[words.ids(" ")[0]]
        for part in CAPTION:
            match part:
                case "<color>":
                    for row, name in enumerate(NAMES):
                        self.tabs["color"][row, place] += embedding[words.ids(f" {name}")].mean(0)
                    place += 1
                case "<number>":
                    for row in range(11):
                        self.tabs["number"][row, place] += embedding[words.ids(str(row))[-1]]
                    place += 1
                case "<shape>":
                    for row, name in enumerate((*SHAPES, "")):
                        letters = [embedding[i] for i in words.ids(f" {name}")] if name else []
                        letters += [space] * (LETTERS - len(letters))
                        self.tabs["shape"][row, place : place + LETTERS] += torch.stack(letters)
                    place += LETTERS
                case _:
                    ids = words.ids(part)
                    self.base[place : place + len(ids)] = embedding[ids]
                    place += len(ids)

    def forward(self, shown: list[Picture]) -> Tensor:
        """Return (batch, tokens, text width)."""
        total = self.base
        for name, rows in numbers(shown).items():
            total = total + self.tabs[name][rows]
        return total


def any_picture(rng: Random) -> Picture:
    """Think of a picture, without drawing it."""
    color = rng.choice(NAMES)
    if rng.random() < 0.5:
        return Picture(color, None, rng.randint(0, 9))
    return Picture(color, rng.choice(SHAPES), rng.randint(1, MOST))


def ask(
    rng: Random,
    words: frozen.Conversations,
    shown: list[Picture],
    embeddings: Sequence[Tensor],
    most: int,
) -> tuple[list[frozen.Row], list[Tensor]]:
    """Return conversations about pictures, and the embeddings that each shows.

    Some are about two pictures, one after the other.
    """
    rows, media, start = [], [], 0
    while start < len(shown):
        end = start + (2 if rng.random() < PAIRS else 1)
        pictures = shown[start:end]
        turns = [
            turn
            for one in pictures
            for turn in conversation(rng, one, most if len(pictures) == 1 else 1)
        ]
        rows.append(words.row(turns, TOKENS, thinking=rng.random() < frozen.THINKING))
        media.append(torch.cat(list(embeddings[start:end])))
        start = end
    return rows, media


def train(code: Code, model: Llama, words: frozen.Conversations, minutes: float, most: int) -> None:
    """Improve the code through the language model until the time is up."""
    rng = Random(0)

    def questions() -> tuple[list[frozen.Row], list[Tensor]]:
        shown = [any_picture(rng) for _ in range(BATCH)]
        return ask(rng, words, shown, code(shown), most)

    frozen.improve(code, model, questions, minutes)


def main() -> None:
    """Find out what the language model has to be shown."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--turns", type=int, default=1, help="questions about a picture, at most")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, words, code = frozen.load(), frozen.Conversations(), Code()
    if options.resume:
        code.load_state_dict(torch.load(options.resume))
    else:
        code.begin_as_caption(model, words)
    train(code, model, words, options.minutes, options.turns)
    torch.save(code.state_dict(), options.output)
    rng = Random(1)
    for kind, questions in ASK.items():
        shown = [one for one in (any_picture(rng) for _ in range(300)) if kind in kinds(one)][:100]
        rows = [
            words.row([(MARK + rng.choice(questions), answer(kind, one))], TOKENS) for one in shown
        ]
        with torch.no_grad():
            _, right = frozen.loss(model, rows, list(code(shown)))
        print(f"{kind}: {right:.2f}")
    shown = [any_picture(rng) for _ in range(200)]
    with torch.no_grad():
        told = code(shown)
        turns = [
            [*conversation(rng, one, 1), *conversation(rng, other, 1)]
            for one, other in zip(shown[::2], shown[1::2], strict=True)
        ]
        rows = [words.row(one, TOKENS) for one in turns]
        _, right = frozen.loss(model, rows, list(told.flatten(0, 1).chunk(100)))
    print(f"two pictures: {right:.2f}")


if __name__ == "__main__":
    main()
