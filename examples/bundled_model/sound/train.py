"""The second lesson of the ears: to show the language model what the code says.

The ears first learn the code alone, which is quick, and later through the language model as
well, which decides the result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model import frozen
from examples.bundled_model.sound.batches import batch
from examples.bundled_model.sound.code import BLANK, SoundCode, rows
from examples.bundled_model.sound.encoder import PER_CHUNK, Ears, EarsConfig
from examples.bundled_model.sound.labels import ctc, heard, save
from examples.bundled_model.sound.mel import Mel
from examples.bundled_model.sound.speech import Clip, load
from examples.bundled_model.teaching import Lesson


def spikes(labels: Sequence[int]) -> list[int]:
    """Keep the first label of each run, as a digit is said once."""
    return [
        label if label != before else BLANK
        for before, label in zip([BLANK, *labels], labels, strict=False)
    ]


def gap(embeddings: Tensor, scores: Tensor, tokens: Tensor, code: SoundCode) -> Tensor:
    """Return how far the embeddings are from the code of the labels that are guessed."""
    spread, losses = code.labels.std(), []
    for index, count in enumerate(tokens.tolist()):
        with torch.no_grad():
            target = code(spikes(scores[index, :count].argmax(-1).tolist()))
        losses.append(functional.mse_loss(embeddings[index, :count] / spread, target / spread))
    return torch.stack(losses).mean()


def train(
    ears: Ears,
    head: nn.Linear,
    code: SoundCode,
    voices: list[list[Clip]],
    options: argparse.Namespace,
) -> None:
    """Teach the ears until the time is up. The digits are asked for as well."""
    rng, lesson = Random(options.seed), Lesson(ears, head, options.rate)
    mel = Mel(ears.config.bands)
    model, words = frozen.load(), frozen.Conversations()
    start, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / (60 * options.minutes)) < 1:
        mels, seconds, said = batch(rng, voices, mel, options.batch, options.most)
        tokens = seconds * PER_CHUNK
        features = ears.features(mels, seconds)
        scores, embeddings = head(features), ears.project(features)
        distance = gap(embeddings, scores, tokens, code)
        loss = ctc(scores, seconds, said) + options.code_weight * distance
        right = 0.0
        if options.asked:
            chosen = said[: options.asked]
            shown = [embeddings[i, : int(tokens[i])] for i in range(len(chosen))]
            asked = rows(rng, words, chosen, [len(one) for one in shown])
            answers, right = frozen.loss(model, asked, shown)
            loss = loss + answers
        loss.backward()
        lesson.step(progress)
        steps += 1
        if steps % 25 == 0:
            known = sum(a == b for a, b in zip(heard(scores, seconds), said, strict=True))
            print(
                f"{steps} {progress:.3f} {float(distance):.4f} heard {known / len(said):.2f} "
                f"answered {right:.2f}",
                flush=True,
            )
        if steps % 100 == 0:
            save(ears, head, options.output)
    save(ears, head, options.output)


def main() -> None:
    """Teach the ears the code, and then through the language model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--recordings", type=Path, required=True, help="the folder of speech.py")
    parser.add_argument("--resume", type=Path, required=True, help="of this, or of labels.py")
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--most", type=int, default=5, help="digits in a row")
    parser.add_argument("--asked", type=int, default=0, help="recordings that are asked about")
    parser.add_argument("--code-weight", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    saved = torch.load(options.resume, weights_only=True)
    ears = Ears(EarsConfig(**saved["config"]))
    ears.load_state_dict(saved["ears"])
    head = nn.Linear(ears.config.width, 11)
    head.load_state_dict(saved["head"])
    code = SoundCode()
    code.load_state_dict(torch.load(options.code))
    train(ears, head, code.requires_grad_(False), load(options.recordings / "train.npz"), options)


if __name__ == "__main__":
    main()
