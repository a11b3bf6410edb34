"""A greedy loop written directly against llama.cpp's C API: what an engine has to agree with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from trioserve.llama import library

#: Fields of `Config` that make the logits nearly independent of the shape of the batch.
EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}

_F32 = 0


@attrs.frozen
class Said:
    """An output, and how far the logit of each token was above that of the second best."""

    tokens: list[int]
    margins: list[float]


class PlainLoop:
    """A model and a context of one sequence, made with nothing but the C API."""

    def __init__(self, model: Any, context: Any) -> None:
        self._context = context
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._n_tokens = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def tokenize(self, prompt: str, *, add_special: bool = True) -> list[int]:
        """Turn a text into tokens, with those that the vocabulary adds to texts."""
        data = prompt.encode()
        tokens = (ctypes.c_int32 * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(
            self._vocab, data, len(data), tokens, len(tokens), add_special, True
        )
        return list(tokens[:n])

    def greedy(self, prompt: Sequence[int], n: int, *, n_batch: int = 1) -> Said:
        """Generate `n` tokens, or fewer if the model ends its output.

        The prompt is decoded in batches of `n_batch` tokens.
        """
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        for start in range(0, len(prompt), n_batch):
            self._decode(prompt[start : start + n_batch])
        said = Said([], [])
        while True:
            token, margin = self._best()
            said.tokens.append(token)
            said.margins.append(margin)
            if len(said.tokens) == n or llama_cpp.llama_vocab_is_eog(self._vocab, token):
                return said
            self._decode([token])

    def scores(self, tokens: Sequence[int], *, n_batch: int = 64) -> list[float]:
        """Compute the log probability of each token after those before it, but for the first.

        They are decoded in batches of `n_batch`, because a row alone is rounded in another way.
        """
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        scores = []
        for start in range(0, len(tokens), n_batch):
            following = tokens[start + 1 : start + n_batch + 1]
            self._decode(tokens[start : start + n_batch], with_logits=True)
            for row, token in enumerate(following):
                logits = self._logits(row).astype(np.float64)
                highest = logits.max()
                total = np.log(np.exp(logits - highest).sum())
                scores.append(float(logits[token] - highest - total))
        return scores

    def _decode(self, tokens: Sequence[int], *, with_logits: bool = False) -> None:
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        flags = (ctypes.c_int8 * len(tokens))(*[1] * len(tokens))
        batch = llama_cpp.llama_batch_get_one(values, len(tokens))
        if with_logits:
            batch.logits = flags
        assert llama_cpp.llama_decode(self._context, batch) == 0

    def _logits(self, row: int = -1) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self._n_tokens,))

    def _best(self) -> tuple[int, float]:
        logits = self._logits()
        second, best = np.argpartition(logits, -2)[-2:]
        return int(best), float(logits[best] - logits[second])


@contextmanager
def plain_loop(path: Path, *, n_ctx: int = 1024, exact: bool = False) -> Iterator[PlainLoop]:
    """Load a model, for one thread.

    By default keys and values are rounded to 16 bits, and what attention makes of them hangs on the
    order of its sums. `exact` is what `EXACT` is for an engine.
    """
    params = _context_params(n_ctx, exact=exact)
    with _opened(path, params) as (model, context):
        yield PlainLoop(model, context)


def plain_embeddings(
    path: Path, texts: Sequence[Sequence[int]], *, pooling: int = -1, width: int | None = None
) -> list[NDArray[np.float32]]:
    """Compute what llama.cpp makes of each text, alone and in one batch; `exact`.

    `pooling` is llama.cpp's number, -1 that of the model; `width` that of a score, if it is one.
    """
    params = _context_params(1024, exact=True)
    params.embeddings, params.pooling_type = True, pooling
    params.n_ubatch = params.n_batch
    embeddings = []
    with _opened(path, params) as (model, context):
        width = width or llama_cpp.llama_model_n_embd(model)
        memory = llama_cpp.llama_get_memory(context)
        for text in texts:
            batch = llama_cpp.llama_batch_init(len(text), 0, 1)
            batch.n_tokens = len(text)
            for i, token in enumerate(text):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            run = llama_cpp.llama_decode if memory else llama_cpp.llama_encode
            if memory:
                llama_cpp.llama_memory_clear(memory, True)
            assert run(context, batch) == 0
            pointer = llama_cpp.llama_get_embeddings_seq(context, 0)
            embeddings.append(np.array(np.ctypeslib.as_array(pointer, shape=(width,))))
            llama_cpp.llama_batch_free(batch)
    return embeddings


def _context_params(n_ctx: int, *, exact: bool) -> Any:
    library.start()  # takes llama.cpp's log
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_threads = params.n_threads_batch = 1
    params.swa_full = False
    params.kv_unified = True
    if exact:
        params.type_k = params.type_v = _F32
        params.flash_attn_type = 0
    return params


@contextmanager
def _opened(path: Path, params: Any) -> Iterator[tuple[Any, Any]]:
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    assert model is not None
    context = llama_cpp.llama_init_from_model(model, params)
    assert context is not None
    try:
        yield model, context
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
