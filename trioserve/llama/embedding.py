"""LlamaEmbedder: a model and a context that makes vectors of texts, as the engine wants them."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import structlog

from trioserve.config import ModelConfig
from trioserve.engine.embedding.backend import POOLINGS, EmbeddingBackend, Matrix
from trioserve.errors import DecodeError, ModelLoadError
from trioserve.llama.batch import Batch
from trioserve.llama.context import Context, generation_params
from trioserve.llama.library import lib
from trioserve.llama.model import Model, Progress
from trioserve.types import TokenId

_log = structlog.get_logger("llama")

#: Texts in one batch. A text of fewer than 8 tokens is rare, and a batch has 512 by default.
_MOST_SEQS = 64

#: Where there is no KV cache, there is no bound for what it holds.
_ENDLESS = 2**31 - 1

#: Tensors that make a score of a vector; without one, llama.cpp makes numbers up.
_HEADS = (b"cls.weight", b"cls.output.weight")

_RERANK_TEMPLATE = "tokenizer.chat_template.rerank"


class LlamaEmbedder(EmbeddingBackend):
    """Implements `trioserve.engine.embedding.backend.EmbeddingBackend` with llama.cpp.

    It may be made in one thread, used in another and closed in a third, one after the other. Only
    `info`, `vocab` and `pair` may be used by any thread at any time.
    """

    def __init__(self, model: Model, context: Context, config: ModelConfig) -> None:
        self._model = model
        self._context = context
        self.info = model.info
        self.vocab = model.vocab
        self.pooling = POOLINGS[lib.llama_pooling_type(context.handle)]
        self.n_slots = config.parallel
        self.n_seqs = context.n_seqs
        self.n_ctx = context.n_ctx if context.has_cache else _ENDLESS
        self.n_batch = min(context.n_batch, self.n_ctx)
        self.can_split = context.has_cache and bool(lib.llama_get_causal_attn(context.handle))
        most = _longest_text(model, config)
        wanted = context.n_ctx_seq if self.can_split else config.ctx_size or most
        self.n_ctx_seq = min(wanted, most)
        count = lib.llama_model_n_cls_out if self.pooling == "rank" else lib.llama_model_n_embd_out
        self.width = int(count(model.handle))
        self._batch = Batch(self.n_batch, n_vocab=self.vocab.n_tokens, n_seqs=self.n_seqs)
        self.batch = self._batch
        self._pairs = _PairTokens.of(model)
        _log.info("embeddings", pooling=self.pooling, width=self.width, most_tokens=self.n_batch)

    @classmethod
    def load(cls, config: ModelConfig, *, progress: Progress | None = None) -> LlamaEmbedder:
        """Load a model and make its context; see `trioserve.llama.load`."""
        model = Model.load(config, progress=progress)
        try:
            context = Context(model, embedding_params(model, config))
        except BaseException:
            model.close()
            raise
        embedder = cls(model, context, config)
        if embedder.pooling == "rank" and not _has_tensor(model, _HEADS):
            embedder.close()
            raise ModelLoadError(f"The model in {model.info.path} has no head that ranks.")
        return embedder

    def pair(self, query: str, document: str) -> tuple[TokenId, ...]:
        """Make of a query and a document the text that a ranking model gives a score to.

        That is the model's template for it, if it has one, or the two between BOS, EOS and SEP,
        as far as the vocabulary wants them.

        Raises:
            InvalidRequestError: one of them cannot be encoded.
            ServerClosingError: the model is closed.
        """
        tokenize, known = self.vocab.tokenize, self._pairs
        template = self.info.metadata.get(_RERANK_TEMPLATE)
        if template is not None:
            parts = {"{query}": query, "{document}": document}
            text = re.sub(r"\{query\}|\{document\}", lambda match: parts[match[0]], template)
            return tokenize(text, add_special=False, parse_special=True)
        ask = tokenize(query, add_special=False, parse_special=False)
        answer = tokenize(document, add_special=False, parse_special=False)
        return (*known.bos, *ask, *known.eos, *known.sep, *answer, *known.eos)

    def compute(self) -> None:
        """Run the batch.

        Raises:
            KVCacheFullError: not enough free cells; nothing has changed.
            DecodeError: anything else; what the sequences hold is unknown.
        """
        self._batch.want_all()
        self._context.decode(self._batch)

    def pooled(self, seq: int) -> Matrix:
        """Return the vector of a sequence, of its part in the last batch. Shape (1, width)."""
        pointer = lib.llama_get_embeddings_seq(self._context.handle, seq)
        return self._copy(pointer, 1, f"sequence {seq}")

    def rows(self, start: int, stop: int) -> Matrix:
        """Return the vectors of rows of the last batch, where there is no pooling."""
        pointer = lib.llama_get_embeddings(self._context.handle)
        return self._copy(pointer, stop, f"row {stop - 1}")[start:]

    def _copy(self, pointer: Any, n_rows: int, what: str) -> Matrix:
        if not pointer:
            raise DecodeError(f"llama.cpp has no embedding for {what}.")
        shape = (n_rows, self.width)
        return np.array(np.ctypeslib.as_array(pointer, shape=shape), dtype=np.float32)

    def forget(self, seq: int) -> None:
        """Drop what a sequence holds."""
        if self._context.has_cache:
            self._context.memory.remove(seq, 0)

    def close(self) -> None:
        """Free the context and the model, in this order. Closing twice is fine."""
        self._context.close()
        self._model.close()


@attrs.frozen
class _PairTokens:
    """What stands between a query and a document: each a token, or none."""

    bos: tuple[TokenId, ...]
    eos: tuple[TokenId, ...]
    sep: tuple[TokenId, ...]

    @classmethod
    def of(cls, model: Model) -> _PairTokens:
        vocab = model.vocab
        sep = lib.llama_vocab_sep(vocab.handle)

        def wanted(adds: Any, token: TokenId) -> tuple[TokenId, ...]:
            return (token,) if adds(vocab.handle) and token >= 0 else ()

        return cls(
            bos=wanted(lib.llama_vocab_get_add_bos, vocab.bos),
            eos=wanted(lib.llama_vocab_get_add_eos, vocab.eos if vocab.eos >= 0 else sep),
            sep=wanted(lib.llama_vocab_get_add_sep, sep),
        )


class _GGUFParams(ctypes.Structure):
    """How `gguf_init_from_file` reads a file: the names of the tensors, and not their values."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def _longest_text(model: Model, config: ModelConfig) -> int:
    """How many tokens a text may have: as in training, or more where positions are scaled.

    A table of positions cannot be scaled, and llama.cpp ends the process beyond its end.
    """
    stretch = max(1.0, 1 / (config.rope_freq_scale or 1.0))
    if stretch > 1 and _has_tensor(model, (b"position_embd.weight",)):
        stretch = 1.0
    most = int(model.info.n_ctx_train * stretch)
    return min(most, config.kv_unified_per_slot or most)


def _has_tensor(model: Model, names: Sequence[bytes]) -> bool:
    """Whether the file has one of these tensors.

    A file in several parts counts as having it: the tensors are spread over all of them.
    """
    if int(model.metadata.get("split.count", 1)) > 1:
        return True
    gguf = lib._lib
    gguf.gguf_init_from_file.argtypes = (ctypes.c_char_p, _GGUFParams)
    gguf.gguf_init_from_file.restype = ctypes.c_void_p
    gguf.gguf_find_tensor.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    gguf.gguf_find_tensor.restype = ctypes.c_int64
    gguf.gguf_free.argtypes = (ctypes.c_void_p,)
    handle = gguf.gguf_init_from_file(os.fsencode(model.info.path), _GGUFParams(True, None))
    if handle is None:
        raise ModelLoadError(f"The model file {model.info.path} cannot be read a second time.")
    try:
        return any(gguf.gguf_find_tensor(handle, name) >= 0 for name in names)
    finally:
        gguf.gguf_free(handle)


def embedding_params(model: Model, config: ModelConfig) -> Any:
    """Make the parameters of a context for embeddings.

    A batch is computed at once, so that the pooled vector of a sequence is that of all its tokens
    in the batch: logical and physical batch are the same, and there is one KV cache for all.

    Raises:
        ModelLoadError: the KV cache would be larger than the memory that is free.
    """
    size = min(config.batch_size, config.ubatch_size)
    holds_state = lib.llama_model_is_recurrent(model.handle) or lib.llama_model_is_hybrid(
        model.handle
    )
    n_ctx = config.ctx_size or config.parallel * config.kv_unified_per_slot
    is_causal = model.metadata.get(f"{model.arch}.attention.causal") != "false"
    params = generation_params(
        model,
        attrs.evolve(
            config,
            # A text that sees all of itself is computed as a whole: more is never held.
            ctx_size=n_ctx if is_causal else size,
            kv_unified_per_slot=0,
            batch_size=size,
            ubatch_size=size,
            parallel=min(config.parallel if holds_state else _MOST_SEQS, size),
            cache_seqs=0,
            kv_unified=True,
        ),
    )
    params.embeddings = True
    params.n_outputs_max = params.n_batch  # every token has a row
    pooling = "rank" if config.reranking else config.pooling
    params.pooling_type = -1 if pooling == "auto" else POOLINGS.index(pooling)
    return params
