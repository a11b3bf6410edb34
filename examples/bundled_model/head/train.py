"""Teach a head to guess what a model says next."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from examples.bundled_model.head.network import Eagle, Target
from examples.bundled_model.optimizer import Muon, schedule

#: The weight of each depth's guess, relative to the one before.
DECAY = 0.9


@dataclass(frozen=True)
class Answer:
    """An answer of the model, with what it computed. See `outputs`."""

    ids: Tensor
    features: Tensor
    tops: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Batch:
    """Answers side by side: tokens and features of cells, and the cells that guess an answer."""

    tokens: Tensor
    features: Tensor
    places: tuple[Tensor, Tensor]
    tops: Tensor
    probs: Tensor


def answers(paths: list[Path]) -> list[Answer]:
    """Read the answers of some files."""
    found = []
    for path in paths:
        with np.load(path) as file:
            ids, features = torch.tensor(file["ids"]).long(), torch.tensor(file["features"])
            tops, probs = torch.tensor(file["tops"]).long(), torch.tensor(file["probs"])
            starts, ends = file["starts"].tolist(), file["ends"].tolist()
        begin = row = 0
        for start, end in zip(starts, ends, strict=True):
            n_tops = end - start + 1  # from the last token of the question on
            part = slice(begin, end)
            found.append(Answer(ids[part], features[part], tops[row : row + n_tops],
                                probs[row : row + n_tops]))  # fmt: skip
            begin, row = end, row + n_tops
    return [each for each in found if len(each.tops) > 4]


def joined(group: list[Answer]) -> Batch:
    """Make a batch. The first cell that guesses an answer reads its question's last token."""
    n_cells = max(len(each.ids) for each in group) - 1
    tokens = torch.zeros(len(group), n_cells, dtype=torch.long)
    features = torch.zeros(len(group), n_cells, group[0].features.shape[1])
    places, tops, probs = [], [], []
    for row, each in enumerate(group):
        length = len(each.ids) - 1
        tokens[row, :length] = each.ids[1:]
        features[row, :length] = each.features[:-1].float()
        cells = torch.arange(length - len(each.tops), length)
        places.append(torch.stack((torch.full_like(cells, row), cells)))
        tops.append(each.tops)
        probs.append(each.probs)
    where = torch.cat(places, dim=1)
    return Batch(tokens, features, (where[0], where[1]), torch.cat(tops), torch.cat(probs).float())


def batches(found: list[Answer], n_tokens: int, rng: Random) -> Iterator[Batch]:
    """Yield all answers once, in batches of like lengths."""
    order = sorted(found, key=lambda each: len(each.ids) + rng.randrange(40))
    groups: list[list[Answer]] = [[]]
    for each in order:
        if sum(len(one.ids) for one in groups[-1]) > n_tokens:
            groups.append([])
        groups[-1].append(each)
    rng.shuffle(groups)
    yield from map(joined, groups)


def losses(head: Eagle, batch: Batch, depth: int) -> tuple[Tensor, list[float]]:
    """Return the loss, and the share of right first choices at each depth."""
    number = torch.full((head.shape.vocab,), -1)
    number[head.known] = torch.arange(len(head.known))
    tops = number[batch.tops]
    probs = batch.probs * (tops >= 0)
    rows, cells = batch.places
    total, right = torch.zeros(()), []
    for k, x in enumerate(head(batch.tokens, batch.features, depth)):
        logits = head.logits(x[rows, cells])
        scores = functional.log_softmax(logits, dim=-1).gather(1, tops.clamp(min=0))
        total = total - DECAY**k * (probs * scores).sum() / len(rows)
        best = head.known[logits.argmax(-1)]
        right.append((best == batch.tops[:, 0]).float().mean().item())
    return total, right


def known_tokens(found: list[Answer], n_known: int, n_vocab: int) -> Tensor:
    """Return the most frequent tokens, ascending."""
    if n_known >= n_vocab:
        return torch.arange(n_vocab)
    counts = torch.zeros(n_vocab)
    for each in found:
        counts.index_add_(0, each.tops.flatten(), each.probs.float().flatten())
    chosen = counts.topk(n_known).indices.sort().values
    print(f"{n_known} tokens: {100 * counts[chosen].sum() / counts.sum():.2f} % of the output")
    return chosen


@torch.no_grad()
def evaluate(head: Eagle, held: list[Answer], depth: int) -> str:
    """Return the shares of right first choices at each depth, in answers that were held out."""
    found = [losses(head, batch, depth)[1] for batch in batches(held, 4096, Random(0))]
    return " ".join(f"{100 * sum(each) / len(each):.1f} %" for each in zip(*found, strict=True))


def main() -> None:
    """Train until the minutes are over, and write a checkpoint each five minutes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the GGUF file of the model")
    parser.add_argument(
        "--outputs", type=Path, required=True, help="the folder that `outputs` wrote"
    )
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint")
    parser.add_argument("--resume", type=Path, help="a checkpoint to begin with")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--known", type=int, default=8192, help="tokens that the head may guess")
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    paths = sorted(options.outputs.glob("*.npz"))
    found = answers(paths)
    held, found = found[:64], found[64:]
    target = Target(options.model)
    saved = torch.load(options.resume, weights_only=True) if options.resume else {}
    known = saved.get("known", known_tokens(found, options.known, target.shape.vocab))
    head = Eagle(target, known)
    head.load_state_dict(saved or head.state_dict())
    print(f"{len(found)} answers, {sum(len(each.tops) for each in found)} tokens")
    muon = Muon(head.matrices(), momentum=0.9, decay=0.0)
    adam = torch.optim.Adam(head.norms(), lr=0.002)
    begin, saved, rng, n_steps = time.monotonic(), time.monotonic(), Random(1), 0
    mean: list[float] = []
    print(f"start: {evaluate(head, held, options.depth)}", flush=True)
    progress = 0.0
    with ThreadPoolExecutor(1) as pool:
        while progress < 1:
            more = [path for path in sorted(options.outputs.glob("*.npz")) if path not in paths]
            found += answers(more)
            paths += more
            for batch in batches(found, options.batch, rng):
                progress = (time.monotonic() - begin) / (60 * options.minutes)
                if progress >= 1:
                    break
                loss, right = losses(head, batch, options.depth)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                scale = schedule(progress)
                for group in adam.param_groups:
                    group["lr"] = 0.002 * scale
                adam.step()
                adam.zero_grad()
                muon.step(options.rate * scale, pool)
                n_steps += 1
                mean = [0.95 * a + 0.05 * b for a, b in zip(mean or right, right, strict=True)]
                if n_steps % 20 == 0:
                    shares = " ".join(f"{100 * each:.1f}" for each in mean)
                    print(
                        f"{n_steps} {100 * progress:.0f} % loss {loss:.3f} right {shares}",
                        flush=True,
                    )
                if time.monotonic() > saved + 300:
                    saved = time.monotonic()
                    print(f"held out: {evaluate(head, held, options.depth)}", flush=True)
                    _save(head, options.output)
    print(f"held out: {evaluate(head, held, options.depth)}")
    _save(head, options.output)


def _save(head: Eagle, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(head.state_dict(), part)
    part.rename(path)


if __name__ == "__main__":
    main()
