"""The first lesson of the eyes: plain labels, without the language model.

The labels are guessed from the mean of all tokens; the heads that guess are thrown away.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.teaching import Lesson
from examples.bundled_model.vision.batches import batch
from examples.bundled_model.vision.drawings import MOST, SHAPES, Drawing, drawing
from examples.bundled_model.vision.encoder import Eyes, EyesConfig
from examples.bundled_model.vision.paint import NAMES, Picture

HEADS = {"color": len(NAMES), "shape": len(SHAPES), "count": MOST, "digit": 10, "kind": 2}
NOTHING = -100


def labels(shown: list[Picture]) -> dict[str, Tensor]:
    """Return the number of each label; what does not apply counts nothing."""
    return {
        "color": torch.tensor([NAMES.index(one.color) for one in shown]),
        "shape": torch.tensor([SHAPES.index(one.shape) if one.shape else NOTHING for one in shown]),
        "count": torch.tensor([one.number - 1 if one.shape else NOTHING for one in shown]),
        "digit": torch.tensor([NOTHING if one.shape else one.number for one in shown]),
        "kind": torch.tensor([int(one.shape is None) for one in shown]),
    }


class Heads(nn.Module):
    """One linear map for each label."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(width, n) for name, n in HEADS.items()})

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """Return the scores from the mean over all tokens."""
        mean = features.mean(1)
        return {name: layer(mean) for name, layer in self.maps.items()}


def score(scores: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the share of right answers, by label."""
    shares = {}
    for name, values in scores.items():
        counts = wanted[name] != NOTHING
        right = (values.argmax(-1) == wanted[name])[counts]
        shares[name] = float(right.float().mean())
    return shares


def train(eyes: Eyes, heads: Heads, pool: list[Drawing], minutes: float, output: Path) -> None:
    """Teach the labels until the time is up."""
    rng, lesson = Random(1), Lesson(eyes, heads, 0.02)
    start, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / (60 * minutes)) < 1:
        pictures, shown = batch(rng, rng.choices(pool, k=128))
        wanted = labels(shown)
        scores = heads(eyes.features(pictures))
        losses = [
            functional.cross_entropy(scores[name], wanted[name], ignore_index=NOTHING)
            for name in HEADS
        ]
        torch.stack(losses).sum().backward()
        lesson.step(progress)
        steps += 1
        if steps % 100 == 0:
            shares = " ".join(f"{n} {100 * s:.0f}" for n, s in score(scores, wanted).items())
            print(f"{steps} {progress:.3f} {float(sum(losses)):.3f} {shares}", flush=True)
        if steps % 500 == 0:
            save(eyes, heads, output)
    save(eyes, heads, output)


def save(eyes: Eyes, heads: Heads, output: Path) -> None:
    """Write a checkpoint."""
    part = output.with_suffix(".part")
    saved = {"config": asdict(eyes.config), "eyes": eyes.state_dict(), "heads": heads.state_dict()}
    torch.save(saved, part)
    part.replace(output)


def main() -> None:
    """Teach the eyes plain labels."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--drawings", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rng = Random(100)
    pool = [drawing(rng) for _ in range(options.drawings)]
    eyes = Eyes(EyesConfig())
    for unused in (eyes.first, eyes.first_bias, eyes.second, eyes.second_bias):
        unused.requires_grad_(False)
    heads = Heads(eyes.config.width)
    print(f"{sum(p.numel() for p in eyes.parameters())} parameters", flush=True)
    train(eyes, heads, pool, options.minutes, options.output)
    fresh = Random(200)
    pictures, shown = batch(fresh, [drawing(fresh) for _ in range(1000)])
    with torch.no_grad():
        print("new drawings:", score(heads(eyes.features(pictures)), labels(shown)))


if __name__ == "__main__":
    main()
