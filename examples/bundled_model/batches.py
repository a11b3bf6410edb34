"""Batches: documents of like length side by side, one document to a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.bundled_model.corpus import documents
from examples.bundled_model.document import Document
from examples.bundled_model.tokenizer import END_OF_TEXT, IM_END, IM_START

POOL = 512


@dataclass(frozen=True)
class Batch:
    """Inputs (rows, length), their next tokens, and how much each one counts."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Row:
    """A document as ids, with a weight for each."""

    ids: list[int]
    weights: list[float]


class Encoder:
    """Turns documents into ids and weights.

    What the assistant says counts fully; the rest of a conversation counts
    little. Bare text counts fully.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_weight: float) -> None:
        self.tokenizer = tokenizer
        self.prompt_weight = prompt_weight
        self.im_start = tokenizer.token_to_id(IM_START)
        self.im_end = tokenizer.token_to_id(IM_END)
        self.header: list[int] = tokenizer.encode(f"{IM_START}assistant\n").ids

    def encode(self, document: Document) -> Row:
        """Encode one document."""
        ids: list[int] = self.tokenizer.encode(document.render(), add_special_tokens=False).ids
        if document.text is not None:
            return Row(ids, [1.0] * len(ids))
        weights = [self.prompt_weight] * len(ids)
        spans = list(self._answers(ids))
        learned = len(spans)
        if document.thinking:  # Earlier turns are rendered without their thoughts.
            roles = [message["role"] for message in document.messages]
            learned = roles[::-1].index("user") - roles[::-1][: roles[::-1].index("user")].count(
                "tool"
            )
        for start, end in spans[-learned:]:
            weights[start:end] = [1.0] * (end - start)
        return Row(ids, weights)

    def _answers(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Yield where the assistant's words start and end, the end token included."""
        size, index = len(self.header), 0
        while index < len(ids):
            if ids[index] == self.im_start and ids[index : index + size] == self.header:
                start = index + size
                end = ids.index(self.im_end, start) + 1
                yield start, end
                index = end
            else:
                index += 1


def batches(
    tokenizer: Tokenizer, seed: int, *, tokens: int, longest: int, prompt_weight: float
) -> Iterator[Batch]:
    """Yield batches of about ``tokens`` tokens; documents are cut at ``longest``."""
    encoder, rng = Encoder(tokenizer, prompt_weight), Random(seed)
    padding = tokenizer.token_to_id(END_OF_TEXT)
    stream = documents(seed)
    while True:
        rows = sorted(
            (encoder.encode(next(stream)) for _ in range(POOL)), key=lambda row: len(row.ids)
        )
        groups: list[list[Row]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * min(len(row.ids), longest) > tokens and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            yield _stack(group, min(longest, max(len(row.ids) for row in group)), padding)


def _stack(rows: list[Row], length: int, padding: int) -> Batch:
    ids = torch.full((len(rows), length), padding)
    weights = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        count = min(length, len(row.ids))
        ids[index, :count] = torch.tensor(row.ids[:count])
        weights[index, :count] = torch.tensor(row.weights[:count])
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights[:, 1:].contiguous())
