"""Train the model for a given number of minutes."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.batches import Batch, batches
from examples.bundled_model.corpus import documents
from examples.bundled_model.document import Document
from examples.bundled_model.export import load_checkpoint
from examples.bundled_model.model import Config, Llama
from examples.bundled_model.optimizer import Muon, schedule
from examples.bundled_model.tokenizer import IM_END, load_tokenizer

WATCHED = ("repeat", "repeat times", "json", "tool call", "recall", "lookup", "count", "capital")


def loss_of(model: Llama, batch: Batch) -> Tensor:
    """Return the summed loss of a batch."""
    weights = batch.weights.flatten()
    keep = weights > 0
    features = model.features(batch.inputs).flatten(0, 1)[keep]
    losses = functional.cross_entropy(
        model.logits(features), batch.targets.flatten()[keep], reduction="none"
    )
    return (losses * weights[keep]).sum()


@torch.no_grad()
def answer(model: Llama, prompt: list[int], stop: int, limit: int) -> list[int]:
    """Continue greedily, without a cache: only for small checks."""
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        features = model.features(torch.tensor([ids]))[:, -1]
        following = int(model.logits(features).argmax())
        if following == stop:
            break
        ids.append(following)
    return ids[len(prompt) :]


class Check:
    """A few held-out questions of the kinds to watch, answered greedily."""

    def __init__(self, tokenizer: Tokenizer, each: int) -> None:
        self.tokenizer = tokenizer
        self.stop = tokenizer.token_to_id(IM_END)
        self.documents: dict[str, list[Document]] = {kind: [] for kind in WATCHED}
        for made in islice(documents(99, held_out=True), 4000):
            group = self.documents.get(made.kind)
            if (
                group is not None
                and len(group) < each
                and len(made.expected()) < 80
                and not made.thinking
            ):
                group.append(made)

    def run(self, model: Llama) -> str:
        """Return the share of right answers by kind."""
        parts = []
        for kind, group in self.documents.items():
            right = 0
            for made in group:
                expected = self.tokenizer.encode(made.expected(), add_special_tokens=False).ids
                prompt = self.tokenizer.encode(made.prompt(), add_special_tokens=False).ids
                right += answer(model, prompt, self.stop, len(expected) + 1) == expected
            parts.append(f"{kind} {right}/{len(group)}")
        return ", ".join(parts)


class Trainer:
    """The model, its optimizers, and the clock that their rates follow."""

    def __init__(self, options: argparse.Namespace, model: Llama) -> None:
        self.options = options
        self.model = model
        self.start = time.monotonic()
        self.pool = ThreadPoolExecutor(options.threads)
        self.parameters = list(model.parameters())
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (matrices if parameter.ndim == 2 and "embedding" not in name else others).append(
                parameter
            )
        self.muon = Muon(matrices, momentum=0.95, decay=options.decay)
        self.adam = torch.optim.AdamW(
            others, lr=options.adam_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    @property
    def progress(self) -> float:
        """The share of the time that is over, from 0 to 1."""
        return (time.monotonic() - self.start) / (self.options.minutes * 60)

    def _gradients(self, batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
        torch.set_num_threads(1)
        loss = loss_of(self.model, batch)
        return float(loss.detach()), torch.autograd.grad(loss, self.parameters)

    def step(self, group: list[Batch]) -> float:
        """Learn from a few batches at once, each on its own core; return the mean loss."""
        rate = schedule(self.progress)
        total, weight = 0.0, sum(float(batch.weights.sum()) for batch in group)
        for loss, gradients in self.pool.map(self._gradients, group):
            total += loss
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                gradient /= weight
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )
        self.muon.step(self.options.rate * rate, self.pool)
        for settings in self.adam.param_groups:
            settings["lr"] = self.options.adam_rate * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return total / weight

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        part = path.with_name(path.name + ".part")
        torch.save({"config": asdict(self.model.config), "model": self.model.state_dict()}, part)
        os.replace(part, path)


def train(options: argparse.Namespace) -> None:
    """Train until the time is over, with a line of figures now and then."""
    torch.manual_seed(options.seed)
    tokenizer = load_tokenizer(options.tokenizer)
    model = Llama(Config(vocab=tokenizer.get_vocab_size()))
    if options.resume:
        model = load_checkpoint(options.resume)
    check = Check(tokenizer, options.check)
    trainer = Trainer(options, model)
    streams = {
        longest: batches(
            tokenizer,
            options.seed + longest,
            tokens=options.batch,
            longest=longest,
            prompt_weight=options.prompt_weight,
        )
        for longest in (options.short, options.long)
    }
    figures: dict[str, float] = defaultdict(float)
    step = seen = 0
    checked = saved = shown = 0.0
    while trainer.progress < 1:
        longest = options.short if trainer.progress < options.long_from else options.long
        group = list(islice(streams[longest], options.accumulate))
        figures["loss"] += trainer.step(group)
        figures["steps"] += 1
        step += 1
        seen += sum(batch.inputs.numel() for batch in group)
        minutes = trainer.progress * options.minutes
        if minutes - shown > 0.5:
            mean, shown = figures["loss"] / figures["steps"], minutes
            print(f"{minutes:6.1f} min  step {step}  tokens {seen}  loss {mean:.4f}", flush=True)
            figures.clear()
        if minutes - saved > options.save_every:
            trainer.save(options.output)
            saved = minutes
        if minutes - checked > options.check_every:
            print(f"{minutes:6.1f} min  {check.run(model)}", flush=True)
            checked = minutes
    trainer.save(options.output)
    print(f"done: step {step}, tokens {seen}, {check.run(model)}", flush=True)


def main() -> None:
    """Train the model for a given number of minutes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="from tokenizer.py")
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint to write")
    parser.add_argument("--resume", type=Path, help="a checkpoint to start from")
    parser.add_argument("--minutes", type=float, default=75, help="how long to train")
    parser.add_argument("--threads", type=int, default=2, help="batches that run at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=3072, help="tokens that run at once")
    parser.add_argument("--accumulate", type=int, default=2, help="batches to a step")
    parser.add_argument("--short", type=int, default=384, help="where documents are cut at first")
    parser.add_argument("--long", type=int, default=2048, help="where they are cut later")
    parser.add_argument("--long-from", type=float, default=0.55, help="share of the time")
    parser.add_argument("--rate", type=float, default=0.012, help="of Muon")
    parser.add_argument("--adam-rate", type=float, default=0.003)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--prompt-weight", type=float, default=0.05)
    parser.add_argument("--check", type=int, default=8, help="held-out questions of each kind")
    parser.add_argument("--check-every", type=float, default=6, help="minutes")
    parser.add_argument("--save-every", type=float, default=4, help="minutes")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
