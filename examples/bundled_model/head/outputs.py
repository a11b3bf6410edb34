"""Let a model answer questions, and keep its tokens and what a head reads of each of them.

A file holds 64 answers with their questions, one after another: `ids`, `features` (a row of the
three layers for each token), `tops` and `probs` (the most probable next tokens), and for each
answer the end of its question and its own end (`starts`, `ends`), counted in tokens of the file.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import attrs
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from examples.bundled_model.head import layers_of
from examples.bundled_model.head.questions import general, of_corpus
from trioserve.config import Config
from trioserve.llama.batch import LlamaBatch
from trioserve.llama.context import Context, open_context
from trioserve.llama.model import LlamaModel
from trioserve.llama.staged import staged
from trioserve.models import BUNDLED

#: Answers that are written at once.
STREAMS = 24
#: Tokens of an answer, and of a question.
LENGTH, LONGEST = 320, 120
#: Next tokens whose probabilities are kept.
TOPS = 16
FILE = 64
#: Of an answer, one is chosen.
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)


@attrs.define
class Answer:
    """A question, and the answer so far; with a row for each token but the newest."""

    tokens: list[int]
    temperature: float
    n_prompt: int = attrs.field()
    features: list[NDArray[np.float16]] = attrs.field(factory=list)
    tops: list[NDArray[np.int32]] = attrs.field(factory=list)
    probs: list[NDArray[np.float16]] = attrs.field(factory=list)

    @n_prompt.default
    def _length(self) -> int:
        return len(self.tokens)


class Writer:
    """Answers questions with a model, `STREAMS` at a time."""

    def __init__(self, path: Path, threads: int, seed: int) -> None:
        n_ctx = STREAMS * (LENGTH + LONGEST)
        config = Config(
            model=str(path), parallel=STREAMS, ctx_size=n_ctx, threads=threads,
            batch_size=STREAMS * LONGEST, ubatch_size=512,
        )  # fmt: skip
        self.model = LlamaModel.load(config)
        self.context: Context = open_context(self.model, config)
        self.layers = layers_of(self.model.info.n_layer)
        self._functions = staged("draft-eagle3")
        for layer in self.layers:
            self._functions.llama_set_embeddings_layer_inp(self.context.handle, layer, True)
        self._batch = LlamaBatch(
            STREAMS * LONGEST, n_vocab=self.model.vocab.n_tokens, n_seqs=self.context.n_seqs
        )
        self._rng, self._numbers = Random(seed), np.random.default_rng(seed)
        self._questions = (of_corpus if path.samefile(BUNDLED) else general)(seed)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(self.model.metadata["tokenizer.chat_template"])

    def question(self) -> Answer:
        """Return a question that is short enough."""
        while True:
            message = {"role": "user", "content": next(self._questions)}
            text = self._template.render(
                messages=[message],
                add_generation_prompt=True,
                enable_thinking=self._rng.random() < 0.7,  # servers ask for it by default
            )
            tokens = list(self.model.vocab.tokenize(text))
            if len(tokens) <= LONGEST:
                return Answer(tokens, self._rng.choice(TEMPERATURES))

    def answers(self) -> Iterator[Answer]:
        """Yield finished answers, for ever."""
        running = [self.question() for _ in range(STREAMS)]
        while True:
            self._step(running)
            for slot, answer in enumerate(running):
                n_new = len(answer.tokens) - answer.n_prompt
                if answer.tokens[-1] in self.model.vocab.end_of_generation or n_new == LENGTH:
                    yield answer
                    running[slot] = self.question()

    def _step(self, running: list[Answer]) -> None:
        """Add a token to each answer."""
        self._batch.clear()
        places = []
        for slot, answer in enumerate(running):
            done = sum(map(len, answer.features))
            if not done:
                self.context.memory.remove(slot, 0)
            last = self._batch.extend(answer.tokens[done:], done, slot)
            self._batch.want_logits(last)
            places.append((last + 1 - len(answer.tokens) + done, last + 1))
        self.context.decode(self._batch)
        rows = np.hstack([self._layer(layer) for layer in self.layers])
        for answer, (start, stop) in zip(running, places, strict=True):
            answer.features.append(rows[start:stop].astype(np.float16))
            logits = self.context.logits(stop - 1, self.model.vocab.n_tokens)
            tops = np.argpartition(logits, -TOPS)[-TOPS:].astype(np.int32)
            tops = tops[np.argsort(-logits[tops])]
            weights = np.exp(logits[tops] - logits[tops[0]])
            answer.tops.append(tops)
            answer.probs.append(
                (weights / np.exp(logits - logits[tops[0]]).sum()).astype(np.float16)
            )
            if not answer.temperature:
                answer.tokens.append(int(tops[0]))
            else:
                chances = weights ** (1 / answer.temperature)
                answer.tokens.append(int(self._numbers.choice(tops, p=chances / chances.sum())))

    def _layer(self, layer: int) -> NDArray[np.float32]:
        width, size = self.model.info.n_embd, len(self._batch)
        pointer = self._functions.llama_get_embeddings_layer_inp(self.context.handle, layer)
        floats = (ctypes.c_float * (size * width)).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(floats, np.float32).reshape(size, width)


def save(path: Path, answers: list[Answer]) -> None:
    """Write a file, at once."""
    lengths = [len(answer.tokens) - 1 for answer in answers]
    ends = np.cumsum(lengths)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate([np.array(each.tokens[:-1], np.int32) for each in answers]),
            features=np.concatenate([row for each in answers for row in each.features]),
            tops=np.stack([row for each in answers for row in each.tops]),
            probs=np.stack([row for each in answers for row in each.probs]),
            starts=ends - lengths + [each.n_prompt for each in answers],
            ends=ends,
        )
    part.rename(path)


def main() -> None:
    """Write files until the minutes are over."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    writer = Writer(options.model, options.threads, options.seed)
    end, n_tokens, held = time.monotonic() + 60 * options.minutes, 0, []
    for answer in writer.answers():
        held.append(answer)
        if len(held) == FILE or time.monotonic() > end:
            save(options.output / f"{options.seed}-{n_tokens:09}.npz", held)
            n_tokens += sum(len(each.tokens) for each in held)
            print(f"{n_tokens} tokens", flush=True)
            held = []
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    main()
