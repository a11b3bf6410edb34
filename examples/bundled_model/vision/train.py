"""The second lesson of the eyes: to show the language model what the code says.

The eyes first learn the code alone, which is quick, and later through the language model as
well, which decides the result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from examples.bundled_model import frozen
from examples.bundled_model.teaching import Lesson
from examples.bundled_model.vision import fonts
from examples.bundled_model.vision.batches import batch
from examples.bundled_model.vision.code import Code, ask
from examples.bundled_model.vision.drawings import Drawing, drawing
from examples.bundled_model.vision.encoder import Eyes, EyesConfig
from examples.bundled_model.vision.labels import HEADS, NOTHING, Heads, labels, save, score
from examples.bundled_model.vision.paint import Picture

Judge = Callable[[Tensor, list[Picture]], Tensor]


def through(model: frozen.Llama, words: frozen.Conversations, rng: Random, turns: int) -> Judge:
    """Return the loss of the answers that the language model gives."""

    def judge(embeddings: Tensor, shown: list[Picture]) -> Tensor:
        return frozen.loss(model, *ask(rng, words, shown, list(embeddings), turns))[0]

    return judge


def train(
    eyes: Eyes,
    heads: Heads,
    code: Code,
    pool: list[Drawing],
    options: argparse.Namespace,
    judge: Judge | None,
) -> None:
    """Teach the eyes until the time is up. Labels are asked for as well: they keep it honest."""
    rng, lesson = Random(options.seed), Lesson(eyes, heads, options.rate)
    spread = code.base.detach().std()
    start, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        pictures, shown = batch(rng, rng.choices(pool, k=options.batch))
        wanted = labels(shown)
        features = eyes.features(pictures)
        scores, embeddings = heads(features), eyes.project(features)
        with torch.no_grad():
            target = code(shown)
        gap = functional.mse_loss(embeddings / spread, target / spread)
        guesses = [
            functional.cross_entropy(scores[name], wanted[name], ignore_index=NOTHING)
            for name in HEADS
        ]
        loss = options.code_weight * gap + 0.4 * torch.stack(guesses).sum()
        asked = judge(embeddings[: options.asked], shown[: options.asked]) if judge else gap * 0
        (loss + asked).backward()
        lesson.step(progress)
        steps += 1
        if steps % 50 == 0:
            shares = " ".join(f"{n} {100 * s:.0f}" for n, s in score(scores, wanted).items())
            lost = f"{float(gap.detach()):.4f} {float(asked.detach()):.4f}"
            print(f"{steps} {progress:.3f} {lost} {shares}", flush=True)
        if steps % 250 == 0:
            save(eyes, heads, options.output)
    save(eyes, heads, options.output)


def main() -> None:
    """Teach the eyes the code, and then through the language model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--resume", type=Path, required=True, help="of this, or of labels.py")
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--asked", type=int, default=0, help="pictures that are asked about")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--code-weight", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drawings", type=int, default=60_000)
    parser.add_argument("--shapes", type=float, default=0.5, help="their share of the drawings")
    parser.add_argument("--fonts", type=Path, help="a folder, for digits in print")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    saved = torch.load(options.resume, weights_only=True)
    eyes = Eyes(EyesConfig(**saved["config"]))
    eyes.load_state_dict(saved["eyes"])
    heads = Heads(eyes.config.width)
    heads.load_state_dict(saved["heads"])
    code = Code()
    code.load_state_dict(torch.load(options.code))
    judge = None
    if options.asked:
        judge = through(frozen.load(), frozen.Conversations(), Random(3), options.turns)
    rng = Random(100 + options.seed)
    printed = list(fonts.find(options.fonts, held_out=False)) if options.fonts else []
    pool = [drawing(rng, shapes=options.shapes, fonts=printed) for _ in range(options.drawings)]
    train(eyes, heads, code, pool, options, judge)
    fresh = Random(200)
    pictures, shown = batch(fresh, [drawing(fresh) for _ in range(1000)])
    with torch.no_grad():
        print("new drawings:", score(heads(eyes.features(pictures)), labels(shown)))


if __name__ == "__main__":
    main()
