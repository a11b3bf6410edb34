"""Finds the head for drafts, in the model's file or in a separate one, and makes its context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from trioserve.config import Config
from trioserve.errors import DecodeError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.batch import RowBatch
from trioserve.llama.context import Context, generation_params
from trioserve.llama.drafter import (
    DraftRules,
    check_cuts,
    check_vocabulary,
    draft_config,
    loading,
)
from trioserve.llama.head_texts import Rows
from trioserve.llama.heads import FEW, BlockDrafter, ChainDrafter, Head, HeadDrafter
from trioserve.llama.layout import Layout, pad
from trioserve.llama.library import lib
from trioserve.llama.model import LlamaModel, Progress
from trioserve.llama.staged import staged
from trioserve.log import get_logger
from trioserve.whole_numbers import whole_number

#: Architectures whose MTP heads llama.cpp computes, with one head for all tokens of a draft. For
#: others, it would end the process.
MTP_FAMILIES = frozenset({
    "cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "glm4moe", "hy_v3",
})  # fmt: skip
#: Architectures whose layers llama.cpp returns the input of. For others, it would end the process.
LAYER_FAMILIES = frozenset({
    "gemma4", "gpt-oss", "hunyuan_vl", "llama", "mimo2", "minimax-m2", "muse-glimmer", "nanbeige",
    "qwen3", "qwen3moe",
})  # fmt: skip

#: llama.cpp's number of a context for MTP heads.
_MTP_CONTEXT = 1

#: Tokens of a block where the file does not say.
_BLOCK = "16"

_log = get_logger("llama")


def load_head(
    model: LlamaModel, context: Context, config: Config, progress: Progress | None = None
) -> HeadDrafter:
    """Make the drafter of the head that `config.head_type` names.

    Raises:
        ModelLoadError: there is none, or it cannot be used; or `progress` cancelled.
        BackendMismatchError: the installed llama.cpp lacks a function.
    """
    name = config.head_type
    assert name is not None
    loader = _Loader(name, model, context, config)
    drafter = loader.mtp() if name == "draft-mtp" else loader.separate(progress)
    _log.info("head for drafts", kind=name, n_max=drafter.n_max)
    return drafter


class _Loader:
    """Makes the drafter of a head; arguments as `load_head`."""

    def __init__(self, name: str, model: LlamaModel, context: Context, config: Config) -> None:
        self._name, self._model = name, model
        self._context, self._config = context, config
        self._functions = staged(name)
        self._n_max = config.spec_draft_n_max

    def _rules(self, n_ctx_seq: int) -> DraftRules:
        return DraftRules.of(self._config, min(self._context.n_ctx_seq, n_ctx_seq), self._n_max)

    def _head(
        self,
        context: Context,
        read: Callable[[int], Sequence[Rows]],
        widths: tuple[int, int],
        own: LlamaModel | None,
    ) -> Head:
        vocab = self._model.vocab if own is None else own.vocab
        return Head(
            name=self._name,
            context=context,
            read=read,
            widths=widths,
            shift=int(self._name == "draft-eagle3"),
            n_known=vocab.n_tokens,
            n_shared=min(vocab.n_tokens, self._model.vocab.n_tokens),
            ends=self._model.vocab.end_of_generation,
            cache_types=(self._config.spec_draft_type_k, self._config.spec_draft_type_v),
            model=own,
        )

    def _open(self, model: LlamaModel, own: Config, n_rows: int, type_: int = 0) -> Context:
        """Make the context of a head, with a sequence for each one of the model.

        It has room for all that these may hold, and for guesses. A few layers take little, so the
        cache is unified, and a copy of a sequence takes no cells. `n_rows` are those of a slot in a
        batch that have logits.
        """
        main, n_slots = self._context, self._config.parallel
        n_cells = pad(main.n_ctx + main.n_copies + n_slots * (self._n_max + 1))
        layout = Layout(
            unified=True, is_elastic=False, n_seqs=main.n_seqs, n_ctx=n_cells, n_part=n_cells
        )
        params = generation_params(model, own, layout, is_whole=not type_, n_scores=0)
        params.n_outputs_max = max(main.n_seqs, n_slots * n_rows)
        params.n_batch = params.n_ubatch = max(params.n_ubatch, params.n_outputs_max)
        params.ctx_type, params.ctx_other = type_, main.handle
        library.lines.are_expected = lambda: True  # it warns that a sequence could be too long
        try:
            return Context(model, params, layout)
        finally:
            library.lines.are_expected = bool

    # -- in the model's file

    def mtp(self) -> HeadDrafter:
        """Make a drafter of the MTP head in the model's file."""
        model, config, functions = self._model, self._config, self._functions
        self._check_mtp()
        own = attrs.evolve(
            config,
            cache_type_k=config.spec_draft_type_k,
            cache_type_v=config.spec_draft_type_v,
        )
        context = self._open(model, own, FEW + 1, _MTP_CONTEXT)
        width = lib.llama_model_n_embd_out(model.handle)
        functions.llama_set_embeddings_nextn(self._context.handle, True, False)
        functions.llama_set_embeddings_nextn(context.handle, True, True)
        rows = _nextn_rows(functions, self._context, width)
        return ChainDrafter(
            self._head(context, lambda n_rows: [rows(n_rows)], (width, width), None),
            self._context,
            self._rules(model.max_n_ctx_seq(config)),
            _nextn_rows(functions, context, width),
        )

    def _check_mtp(self) -> None:
        model = self._model
        path, n_heads = model.info.path, self._functions.llama_model_n_layer_nextn(model.handle)
        first = f"blk.{model.info.n_layer}.nextn.eh_proj.weight".encode()
        if not n_heads or not model.has_tensor((first,)):
            raise ModelLoadError(
                f"spec_type 'draft-mtp' needs a model file with MTP heads, and {path} has none."
            )
        check_cuts(model, "drafts by a head")
        if n_heads > 1 or model.arch not in MTP_FAMILIES:
            raise ModelLoadError(
                f"The MTP heads of {path} cannot be used: those of its architecture, {model.arch}, "
                "are not supported."
            )

    # -- in a separate file

    def separate(self, progress: Progress | None) -> HeadDrafter:
        """Make a drafter of an EAGLE-3 head or a DFlash model."""
        check_cuts(self._model, "drafts by a head")
        own = draft_config(self._config, self._context)
        model = LlamaModel.load(own, progress=progress, is_head=True)
        with loading(model, "cannot make drafts"):
            layers = self._layers_for(model)
            check_vocabulary(model, self._model)
            make = self._eagle3 if self._name == "draft-eagle3" else self._dflash
            return make(model, own, layers)

    def _layers_for(self, model: LlamaModel) -> Sequence[int]:
        """Return the layers of the model that the head reads."""
        arch, functions, main = self._name.removeprefix("draft-"), self._functions, self._model
        if model.arch != arch:
            raise ModelLoadError(f"it is of the kind {model.arch}, and not {arch}.")
        if main.arch not in LAYER_FAMILIES:
            raise ModelLoadError(
                f"for models of the architecture {main.arch}, such drafts are not supported."
            )
        pointer = functions.llama_model_target_layer_ids(model.handle)
        layers = list(pointer[: functions.llama_model_target_layer_ids_n(model.handle)])
        if not layers or not all(0 <= layer < main.info.n_layer for layer in layers):
            raise ModelLoadError(
                f"it reads the layers {layers}, but the model has {main.info.n_layer}."
            )
        width = model.metadata.get(f"{arch}.target_hidden_size", str(model.info.n_embd))
        if width != str(main.info.n_embd):
            raise ModelLoadError(f"it is for models of the width {width}, and not "
                                 f"{main.info.n_embd}.")  # fmt: skip
        return layers

    def _layer_rows(self, layers: Sequence[int]) -> Callable[[int], Sequence[Rows]]:
        """Have the model keep what goes into some layers; returns what reads it."""
        functions, context, width = self._functions, self._context, self._model.info.n_embd
        for layer in layers:
            functions.llama_set_embeddings_layer_inp(context.handle, layer, True)

        def read(n_rows: int) -> Sequence[Rows]:
            get, handle = functions.llama_get_embeddings_layer_inp, context.handle
            return [_rows_at(get(handle, layer), n_rows, width) for layer in layers]

        return read

    def _eagle3(self, model: LlamaModel, own: Config, layers: Sequence[int]) -> HeadDrafter:
        functions, width = self._functions, model.info.n_embd
        context = self._open(model, own, FEW + 1)
        functions.llama_set_embeddings_nextn(context.handle, True, True)
        hidden = _nextn_rows(functions, context, width)

        def encode(rows: Rows) -> Rows:
            encoded = np.empty((len(rows), width), np.float32)
            for start in range(0, len(rows), context.n_outputs):
                piece = rows[start : start + context.n_outputs]
                pos = context.memory.last(0) + 1  # the encoder knows no positions
                context.decode(RowBatch(piece, pos, 0, logits=True), encodes=True)
                encoded[start : start + len(piece)] = hidden(len(piece))
            return encoded

        widths = len(layers) * self._model.info.n_embd, width
        head = self._head(context, self._layer_rows(layers), widths, model)
        return ChainDrafter(
            attrs.evolve(head, encode=encode),
            self._context,
            self._rules(model.max_n_ctx_seq(own)),
            hidden,
        )

    def _dflash(self, model: LlamaModel, own: Config, layers: Sequence[int]) -> HeadDrafter:
        functions = self._functions
        kinds = (b"selector_hidden.weight", b"markov_w1.weight")
        if functions.llama_model_dflash_selector_top_k(model.handle) > 0 or model.has_tensor(kinds):
            raise ModelLoadError("it is a DFlash 2 or DSpark model, which are not supported.")
        mask = lib.llama_vocab_mask(model.vocab.handle)
        if not 0 <= mask < model.vocab.n_tokens:
            raise ModelLoadError("its vocabulary has no mask token.")
        given = model.metadata.get("dflash.block_size", _BLOCK)
        if (block := whole_number(given, least=2)) is None:
            raise ModelLoadError(f"its blocks have {given} tokens.")
        self._n_max = min(self._n_max, block - 1)
        context = self._open(model, own, self._n_max + 1)
        is_causal = model.metadata.get("dflash.attention.causal") == "true"
        lib.llama_set_causal_attn(context.handle, is_causal)
        read, width = self._layer_rows(layers), len(layers) * self._model.info.n_embd
        return BlockDrafter(
            self._head(context, read, (width, width), model),
            self._context,
            self._rules(model.max_n_ctx_seq(own)),
            mask,
        )


def _nextn_rows(functions: Any, context: Context, width: int) -> Callable[[int], Rows]:
    """Return what reads the rows that a context has computed for a head, or as one."""
    return lambda n_rows: _rows_at(
        functions.llama_get_embeddings_nextn(context.handle), n_rows, width
    )


def _rows_at(address: int | None, n_rows: int, width: int) -> Rows:
    """Return a view of rows that llama.cpp has, until the next batch."""
    if address is None:
        raise DecodeError("llama.cpp has no rows for the head")
    floats: Any = (ctypes.c_float * (n_rows * width)).from_address(address)
    return np.frombuffer(floats, np.float32).reshape(n_rows, width)
