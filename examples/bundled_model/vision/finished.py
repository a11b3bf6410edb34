"""The eyes of a projector file, and the code that they learned, to teach them more.

The heads and the code are not in the file. Both follow from what the eyes make of drawings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from examples.bundled_model.media import PROJECTOR
from examples.bundled_model.projector import load_eyes
from examples.bundled_model.vision.batches import batch
from examples.bundled_model.vision.code import Code, numbers
from examples.bundled_model.vision.drawings import drawing
from examples.bundled_model.vision.encoder import Eyes
from examples.bundled_model.vision.labels import HEADS, NOTHING, Heads, labels, save, score
from examples.bundled_model.vision.paint import Picture

BATCH = 500
STEPS = 400


@torch.no_grad()
def look(eyes: Eyes, drawings: int) -> tuple[Tensor, Tensor, list[Picture]]:
    """Return what the eyes make of drawings: the features' means, the embeddings, the labels."""
    rng = Random(300)
    means, told, shown = [], [], []
    for _ in range(0, drawings, BATCH):
        pictures, labelled = batch(rng, [drawing(rng, shapes=0.6) for _ in range(BATCH)])
        features = eyes.features(pictures)
        means.append(features.mean(1))
        told.append(eyes.project(features))
        shown += labelled
    return torch.cat(means), torch.cat(told), shown


def fit_heads(heads: Heads, means: Tensor, shown: list[Picture]) -> None:
    """Learn to tell the labels from the finished features."""
    wanted = labels(shown)
    adam = torch.optim.Adam(heads.parameters(), 0.02)
    for _ in range(STEPS):
        scores = heads(means[:, None])
        losses = [
            functional.cross_entropy(scores[name], wanted[name], ignore_index=NOTHING)
            for name in HEADS
        ]
        torch.stack(losses).sum().backward()
        adam.step()
        adam.zero_grad()
    print("labels:", score(heads(means[:, None]), wanted))


@torch.no_grad()
def fit_code(code: Code, told: Tensor, shown: list[Picture]) -> None:
    """Find the tables whose sums are nearest to the embeddings, by least squares."""
    rows = numbers(shown)
    parts = [
        functional.one_hot(torch.tensor(rows[name]), len(table))
        for name, table in code.tabs.items()
    ]
    given = torch.cat(parts, 1).double()
    mean = told.mean(0)
    # The columns of a table add up to one, so the solution is not unique: take the smallest.
    found = torch.linalg.pinv(given) @ (told - mean).flatten(1).double()
    code.base.copy_(mean)
    tables = found.float().split([len(table) for table in code.tabs.values()])
    for table, values in zip(code.tabs.values(), tables, strict=True):
        table.copy_(values.view_as(table))
    gap = functional.mse_loss(code(shown), told) / told.var()
    print(f"of the embeddings, the code leaves {100 * gap:.1f} % unexplained")


def main() -> None:
    """Write the eyes of a projector file as a checkpoint, and their code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--projector", type=Path, default=PROJECTOR)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--drawings", type=int, default=10_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    eyes, code = load_eyes(options.projector), Code()
    heads = Heads(eyes.config.width)
    means, told, shown = look(eyes, options.drawings)
    fit_heads(heads, means, shown)
    fit_code(code, told, shown)
    save(eyes, heads, options.output)
    torch.save(code.state_dict(), options.code)


if __name__ == "__main__":
    main()
