"""The finished language model, as something to learn through: its weights do not change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.chat import render
from examples.bundled_model.media import BUNDLED, MARK
from examples.bundled_model.model import Config, Llama
from examples.bundled_model.tokenizer import IM_END

#: The place of the next embedding of a picture or a recording.
MEDIA = -1
#: The share of conversations with thinking.
THINKING = 0.4
NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo what the export does to the rows of each head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def load(path: Path = BUNDLED) -> Llama:
    """Read the language model from its GGUF file."""
    reader = gguf.GGUFReader(path)
    tensors = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    config = Config()
    state = {"embedding": tensors["token_embd.weight"], "norm": tensors["output_norm.weight"]}
    for index in range(config.layers):
        for ours, theirs in NAMES.items():
            value = tensors[f"blk.{index}.{theirs}.weight"]
            if ours in ("q", "k"):
                value = _halves(value, config.heads if ours == "q" else config.kv_heads)
            state[f"blocks.{index}.{ours}"] = value
    model = Llama(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model.eval().requires_grad_(False)


@dataclass
class Row:
    """A conversation as ids, with places for media, and how much each id counts."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class Conversations:
    """Turns conversations about media into rows."""

    def __init__(self, path: Path = BUNDLED) -> None:
        self.vocabulary = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        self.known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Tokenize as the server does."""
        if text not in self.known:
            self.known[text] = self.vocabulary.tokenize(text.encode(), add_bos=False, special=True)
        return self.known[text]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.vocabulary.detokenize(list(ids)).decode(errors="replace")

    def row(
        self,
        turns: Sequence[tuple[str, str]],
        n_media: int,
        around: tuple[str, str] = ("", ""),
        *,
        thinking: bool = False,
    ) -> Row:
        """Make a row of questions, some with ``MARK``, and their answers.

        ``around`` is what libmtmd writes before and behind the media. With thinking, which is
        what the server asks for by default, only the last answer is learned: the thoughts of
        earlier turns are not in a prompt.
        """
        row = Row()
        messages: list[dict[str, str]] = []
        written = ""
        for index, (question, answer) in enumerate(turns, 1):
            messages.append({"role": "user", "content": question})
            prompt = render(messages, prompt=True, thinking=thinking)
            self._add(row, prompt[len(written) :], n_media, around)
            thinks = thinking and index == len(turns)
            said = f"<think>\n{answer}\n</think>\n\n{answer}" if thinks else answer
            reply = self.ids(said) + self.ids(IM_END)
            row.ids += reply
            row.weights += [float(thinks or not thinking)] * len(reply)
            messages.append({"role": "assistant", "content": answer})
            written = prompt + answer + IM_END
        return row

    def _add(self, row: Row, text: str, n_media: int, around: tuple[str, str]) -> None:
        before, mark, after = text.partition(MARK)
        ids = self.ids(before)
        if mark:
            media = [*self.ids(around[0]), *[MEDIA] * n_media, *self.ids(around[1])]
            ids = [*ids, *media, *self.ids(after)]
        row.ids += ids
        row.weights += [0.0] * len(ids)


def loss(model: Llama, rows: Sequence[Row], media: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Return the loss of the answers, and the share of rows that are right in every token.

    ``media`` holds the embeddings of each row.
    """
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), 0)
    weights = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        weights[index, : len(row.ids)] = torch.tensor(row.weights)
    places = ids == MEDIA
    x = functional.embedding(ids.clamp(min=0), model.embedding)
    x = x.masked_scatter(places[..., None], torch.cat(list(media)))
    chosen = weights[:, 1:] > 0
    scores = model.logits(model.continued(x)[:, :-1][chosen])
    wanted = ids[:, 1:][chosen]
    losses = functional.cross_entropy(scores, wanted, reduction="none")
    wrong = torch.zeros_like(chosen, dtype=torch.float)
    wrong[chosen] = (scores.argmax(-1) != wanted).float()
    right = float((wrong.sum(1) == 0).float().mean())
    return losses.mean(), right


def improve(
    code: nn.Module,
    model: Llama,
    ask: Callable[[], tuple[Sequence[Row], Sequence[Tensor]]],
    minutes: float,
) -> None:
    """Improve a code through the language model until the time is up.

    `ask` gives conversations, and what the code shows in each.
    """
    rate = 3e-3
    adam = torch.optim.Adam(code.parameters(), rate, (0.9, 0.98))
    start, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / (60 * minutes)) < 1:
        for group in adam.param_groups:
            group["lr"] = rate * min(1, (steps + 1) / 30, (1 - progress) / 0.7)
        rows, shown = ask()
        noisy = [one + torch.randn_like(one) * 0.01 for one in shown]
        lost, right = loss(model, rows, noisy)
        lost.backward()
        adam.step()
        adam.zero_grad()
        steps += 1
        if steps % 25 == 0:
            print(
                f"{steps} {progress:.3f} {float(lost.detach()):.4f} right {right:.2f}", flush=True
            )
