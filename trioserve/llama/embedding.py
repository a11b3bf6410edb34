"""LlamaEmbedder: a model and a context that computes embeddings, for the engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import attrs
import numpy as np

from trioserve.config import Config
from trioserve.engine.backend import POOLINGS, EmbeddingBackend, Matrix, MediaPiece
from trioserve.errors import DecodeError, ModelLoadError, NotSupportedError
from trioserve.llama import no_logits
from trioserve.llama.batch import LlamaBatch, decode_pieces
from trioserve.llama.context import Context, generation_params, thread_choices
from trioserve.llama.layout import beside_text, for_embeddings
from trioserve.llama.library import lib
from trioserve.llama.media.projector import LlamaProjector
from trioserve.llama.model import LlamaModel, Progress
from trioserve.log import get_logger
from trioserve.models import resolve_projector
from trioserve.types import TokenId
from trioserve.whole_numbers import whole_number

_log = get_logger("llama")

#: The size of a KV cache that does not exist, for models that compute each batch on its own.
_NO_LIMIT = 2**31 - 1

#: Tensors that turn an embedding into a score. Without one, llama.cpp returns meaningless numbers.
_HEADS = (b"cls.weight", b"cls.output.weight")

#: Models whose graph ends in a softmax over the classes.
_WITH_SOFTMAX = ("qwen3", "qwen3vl")

_RERANK_TEMPLATE = "tokenizer.chat_template.rerank"


class LlamaEmbedder(EmbeddingBackend):
    """Implements `trioserve.engine.backend.EmbeddingBackend` with llama.cpp.

    It may be made in one thread, used in another and closed in a third. `info`, `vocab` and `pair`
    may be used by any thread at any time.
    """

    def __init__(self, model: LlamaModel, context: Context, config: Config) -> None:
        self._model = model
        #: Gives back a borrowed model, in place of closing it.
        self._give_back: Callable[[], None] | None = None
        self._context = context
        self.info = model.info
        self.vocab = model.vocab
        self.projector: LlamaProjector | None = None
        self.pooling = POOLINGS[lib.llama_pooling_type(context.handle)]
        self.n_slots = config.parallel
        self.n_seqs = context.n_seqs
        self.n_ctx = context.n_ctx if context.has_cache else _NO_LIMIT
        self.n_batch = min(context.n_batch, self.n_ctx)
        self.can_split = context.has_cache and bool(lib.llama_get_causal_attn(context.handle))
        max_n_ctx_seq = model.max_n_ctx_seq(config)
        n_ctx_seq = context.n_ctx_seq if self.can_split else config.ctx_size or max_n_ctx_seq
        self.n_ctx_seq = min(n_ctx_seq, max_n_ctx_seq)
        count = lib.llama_model_n_cls_out if self.pooling == "rank" else lib.llama_model_n_embd_out
        self.width = int(count(model.handle))
        self.labels = _labels(model) if self.pooling == "rank" else ()
        self.scores_are_probs = self.pooling == "rank" and model.arch in _WITH_SOFTMAX
        self.thread_choices = thread_choices(config)
        self._batch = LlamaBatch(self.n_batch, n_vocab=self.vocab.n_tokens, n_seqs=self.n_seqs)
        self.batch = self._batch
        self._pairs = _PairTokens.of(model)
        layout = "unified" if context.has_cache else "none"
        size = self.n_batch
        _log.info(
            "embeddings", pooling=self.pooling, width=self.width, max_tokens=size, layout=layout
        )

    @classmethod
    def load(cls, config: Config, *, progress: Progress | None = None) -> LlamaEmbedder:
        """Load a model and make its context; see `trioserve.llama.load`."""
        with ExitStack() as made:  # it is closed where the rest fails
            model = made.enter_context(LlamaModel.load(config, progress=progress))
            projector = None
            path = None if config.reranking else resolve_projector(config)
            if path is not None:
                projector = LlamaProjector.load(path, model, config)
                made.callback(projector.close)
            max_chunk = projector.max_chunk if projector is not None else 0
            params = embedding_params(model, config, max_chunk=max_chunk)
            embedder = cls(model, made.enter_context(Context(model, params)), config)
            embedder.projector = projector
            if (why := embedder._refusal()) is not None:
                raise ModelLoadError(f"The model in {model.info.path} {why}.")
            made.pop_all()
        return embedder

    @classmethod
    def beside(cls, model: LlamaModel, config: Config) -> LlamaEmbedder:
        """Make a context of a model that generates text, which keeps the weights until its end.

        Raises:
            ModelLoadError: it cannot be made, for want of memory.
            ServerClosingError: the model is closed.
        """
        pooling = pooling_beside(model, config)
        own = beside_text(config, model.info.n_ctx_train, pooling)
        with ExitStack() as made:  # undone where the rest fails
            made.callback(model.lend())
            embedder = cls(
                model, made.enter_context(Context(model, embedding_params(model, own))), own
            )
            embedder._give_back = made.pop_all().close
        return embedder

    def _refusal(self) -> str | None:
        """Return why the model cannot do this; None: it can."""
        if self.pooling == "rank" and not self._model.has_tensor(_HEADS):
            return "has no classification head, so it cannot rank"
        if self.projector is None:
            return None
        if self.pooling == "rank":
            return "ranks documents, which are text: start it with --no-mmproj"
        if not self.can_split:
            return "takes a text as a whole, so it takes no media: start it with --no-mmproj"
        return None

    def pair(self, query: str, document: str, most: int | None = None) -> tuple[TokenId, ...]:
        """Join a query and a document, as `EmbeddingBackend` has it.

        That is done by the template in the model file, if there is one, or else by putting BOS, EOS
        and SEP around the two, as far as the vocabulary uses them.
        """
        tokenize, known = self.vocab.tokenize, self._pairs
        template = self.info.metadata.get(_RERANK_TEMPLATE)
        if template is not None:
            if most is not None:
                tokens = tokenize(document, add_special=False, parse_special=True)
                if len(tokens) > most:
                    document = self.vocab.detokenize(tokens[:most]).decode(errors="ignore")
            parts = {"{query}": query, "{document}": document}
            text = re.sub(r"\{query\}|\{document\}", lambda match: parts[match[0]], template)
            return tokenize(text, add_special=False, parse_special=True)
        ask = tokenize(query, add_special=False, parse_special=False)
        answer = tokenize(document, add_special=False, parse_special=False)[:most]
        return (*known.bos, *ask, *known.eos, *known.sep, *answer, *known.eos)

    @property
    def beyond_interface(self) -> tuple[str, ...]:
        """As `LlamaBackend.beyond_interface`, once a batch was computed."""
        means = {
            "no_logits": no_logits.is_used(),
            "encoder_threads": self.projector is not None and self.projector.can_set_threads,
        }
        return tuple(name for name, is_used in means.items() if is_used)

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from the next batch on."""
        self._context.set_threads(count)

    def compute(self) -> None:
        """Run the batch, as `EmbeddingBackend` has it."""
        self._batch.want_all()
        self._context.decode(self._batch)

    def compute_media(self, piece: MediaPiece) -> None:
        """Run a batch of cells of a chunk, as `EmbeddingBackend` has it.

        Raises also NotSupportedError: the model takes text only; EngineError: it cannot be a batch.
        """
        if self.projector is None:
            raise NotSupportedError("The model takes text only.")
        width, has_sections = self.projector.width, self.projector.has_sections
        decode_pieces(self._context, [piece], width, has_sections=has_sections, wants_all=True)

    def interrupt(self) -> None:
        """Interrupt the running batch. Call it from any thread."""
        if self._model.can_cut or self._model.cuttable or not self._context.has_cache:
            self._context.interrupt()

    def pooled(self, seq: int) -> Matrix:
        """Return the embedding of a sequence's part in the last batch. Shape (1, width)."""
        pointer = lib.llama_get_embeddings_seq(self._context.handle, seq)
        return self._copy(pointer, 1, f"sequence {seq}")

    def rows(self, start: int, stop: int) -> Matrix:
        """Return the embeddings of rows of the last batch, without pooling."""
        pointer = lib.llama_get_embeddings(self._context.handle)
        return self._copy(pointer, stop, f"row {stop - 1}")[start:]

    def _copy(self, pointer: Any, n_rows: int, what: str) -> Matrix:
        if not pointer:
            raise DecodeError(f"llama.cpp has no embedding for {what}.")
        shape = (n_rows, self.width)
        return np.array(np.ctypeslib.as_array(pointer, shape=shape), dtype=np.float32)

    def forget(self, seq: int) -> None:
        """Empty a sequence."""
        if self._context.has_cache:
            self._context.memory.remove(seq, 0)

    def close(self) -> None:
        """Free the projector, the context and the model, in this order. Closing twice is fine."""
        if self.projector is not None:
            self.projector.close()
        if self._give_back is not None:
            self._give_back()  # nothing, the second time
            return
        self._context.close()
        self._model.close()


def pooling_beside(model: LlamaModel, config: Config) -> str:
    """Choose the pooling of embeddings of a model that generates text.

    Where neither the configuration nor the file says, it is that of the last token, which has seen
    the whole text.
    """
    if config.pooling != "auto":
        return config.pooling
    number = whole_number(model.metadata.get(f"{model.arch}.pooling_type", ""))
    said = POOLINGS[number] if number is not None and number < len(POOLINGS) else "none"
    return "last" if said in ("none", "rank") else said


def _labels(model: LlamaModel) -> tuple[str, ...]:
    """The names of the classes in the file; none, if it names none."""
    count = lib.llama_model_n_cls_out(model.handle)
    labels = (lib.llama_model_cls_label(model.handle, i) for i in range(count))
    return tuple(label.decode(errors="replace") for label in labels if label is not None)


@attrs.frozen
class _PairTokens:
    """The tokens around a query and a document: each one token, or none."""

    bos: tuple[TokenId, ...]
    eos: tuple[TokenId, ...]
    sep: tuple[TokenId, ...]

    @classmethod
    def of(cls, model: LlamaModel) -> _PairTokens:
        vocab = model.vocab
        sep = lib.llama_vocab_sep(vocab.handle)

        def used(adds: Any, token: TokenId) -> tuple[TokenId, ...]:
            return (token,) if adds(vocab.handle) and token >= 0 else ()

        return cls(
            bos=used(lib.llama_vocab_get_add_bos, vocab.bos),
            eos=used(lib.llama_vocab_get_add_eos, vocab.eos if vocab.eos >= 0 else sep),
            sep=used(lib.llama_vocab_get_add_sep, sep),
        )


def embedding_params(model: LlamaModel, config: Config, *, max_chunk: int = 0) -> Any:
    """Make the parameters of a context for embeddings. `max_chunk`: see `generation_params`.

    The logical batch is as large as the physical one, so that a pooled embedding covers all tokens
    that a sequence has in the batch. There is one KV cache for all sequences.

    Raises:
        ModelLoadError: the KV cache would be larger than the memory that is free.
    """
    size = max(min(config.batch_size, config.ubatch_size), max_chunk)
    is_causal = model.metadata.get(f"{model.arch}.attention.causal") != "false"
    config = for_embeddings(config, size, is_causal=is_causal, has_state=model.has_state)
    params = generation_params(model, config, n_scores=0)
    params.embeddings = True
    no_logits.install(params)
    params.n_outputs_max = params.n_batch  # every token has a row
    pooling = "rank" if config.reranking else config.pooling
    params.pooling_type = -1 if pooling == "auto" else POOLINGS.index(pooling)
    return params
