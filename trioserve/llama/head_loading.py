"""Finds the head for drafts, in the model's file or in a separate one, and makes its context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
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
    check_vocabulary,
    draft_config,
    loading,
)
from trioserve.llama.head_blocks import Block, BlockDrafter
from trioserve.llama.head_texts import Rows
from trioserve.llama.heads import (
    FEW,
    AssistantDrafter,
    ChainDrafter,
    Head,
    HeadDrafter,
    SeveralHeadsDrafter,
)
from trioserve.llama.layout import Layout, pad
from trioserve.llama.library import lib
from trioserve.llama.model import LlamaModel, Progress
from trioserve.llama.staged import staged
from trioserve.log import get_logger
from trioserve.models.head_families import ASSISTED, FAMILIES, refusal
from trioserve.whole_numbers import whole_number

#: llama.cpp's number of a context for MTP heads.
_MTP_CONTEXT = 1

#: Layers of the model that an EAGLE-3 head reads.
_EAGLE_LAYERS = 3

#: Tokens of a block of DFlash where the file does not say.
_BLOCK = "16"

_log = get_logger("llama")


def load_head(
    model: LlamaModel, context: Context, config: Config, progress: Progress | None = None
) -> HeadDrafter:
    """Make the drafter of the head that `config.head_type` names.

    Raises:
        ModelLoadError: it is missing, or cannot be used; or `progress` cancelled.
        BackendMismatchError: the installed llama.cpp lacks a function.
    """
    name = config.head_type
    assert name is not None
    loader = _Loader(name, model, context, config)
    drafter = loader.mtp(progress) if name == "draft-mtp" else loader.separate(progress)
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

    def _open(
        self,
        model: LlamaModel,
        own: Config,
        n_rows: int,
        type_: int = 0,
        *,
        layout: Layout | None = None,
    ) -> Context:
        """Make the context of a head, with a sequence for each one of the model.

        By default, it has room for all that these may hold, and for guesses. A few layers take
        little, so the cache is unified, and a copy of a sequence takes no cells. `n_rows` are those
        of a slot in a batch that have logits.
        """
        main, n_slots = self._context, self._config.parallel
        if layout is None:
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

    # -- MTP heads

    def mtp(self, progress: Progress | None) -> HeadDrafter:
        """Make a drafter of the MTP heads in the model's file, or in a separate one."""
        if self._config.spec_draft_model is None:
            self._check_mtp(self._model)
            kinds = self._config.spec_draft_type_k, self._config.spec_draft_type_v
            own = attrs.evolve(
                self._config, cache_type_k=kinds[0], cache_type_v=kinds[1], swa_full=True
            )
            return self._mtp(None, own)
        own = attrs.evolve(draft_config(self._config, self._context), spec_type=("draft-mtp",))
        with loading(
            LlamaModel.load(own, progress=progress, is_head=True), "cannot make drafts"
        ) as model:
            self._check_assistant(model) if model.arch in ASSISTED else self._check_mtp(model)
            check_vocabulary(model, self._model)
            return self._mtp(model, own)

    def _mtp(self, separate: LlamaModel | None, own: Config) -> HeadDrafter:
        functions, model = self._functions, separate or self._model
        main, layout, type_ = self._context, None, _MTP_CONTEXT
        if is_assistant := model.arch in ASSISTED:
            # Its KV cache is the model's, so it is divided in the same way.
            n_ctx = main.n_ctx_seq if main.unified else main.n_ctx_seq * main.n_seqs
            layout = Layout(
                unified=main.unified,
                is_elastic=False,
                n_seqs=main.n_seqs,
                n_ctx=n_ctx,
                n_part=main.n_ctx_seq,
            )
        n_heads = functions.llama_model_n_layer_nextn(model.handle)
        if not is_assistant and n_heads > 1:
            self._n_max = min(self._n_max, n_heads)
        n_rows = max(FEW, self._n_max if n_heads > 1 else 0) + 1
        context = self._open(model, own, n_rows, type_, layout=layout)
        width = lib.llama_model_n_embd_out(model.handle)
        functions.llama_set_embeddings_nextn(main.handle, True, False)
        functions.llama_set_embeddings_nextn(context.handle, True, True)
        rows = _nextn_rows(functions, main, width)
        head = self._head(context, lambda n_rows: [rows(n_rows)], (width, width), separate)
        rules = self._rules(self._model.max_n_ctx_seq(self._config))
        hidden = _nextn_rows(functions, context, width)
        if is_assistant:
            return AssistantDrafter(head, main, rules, hidden)
        if n_heads == 1:
            return ChainDrafter(head, main, rules, hidden)
        choose = partial(functions.llama_set_nextn_layer_offset, context.handle)
        return SeveralHeadsDrafter(head, main, rules, hidden, choose)

    def _check_mtp(self, model: LlamaModel) -> None:
        """Raise ModelLoadError unless this file has MTP heads for the model that can be computed.

        The message names the file, unless the heads are in a separate one.
        """
        main, path = self._model, model.info.path
        n_heads = self._functions.llama_model_n_layer_nextn(model.handle)
        names = [
            f"blk.{model.info.n_layer + i}.nextn.eh_proj.weight".encode() for i in range(n_heads)
        ]
        if not n_heads or not all(model.has_tensor((name,)) for name in names):
            raise ModelLoadError(
                f"spec_type 'draft-mtp' needs a file with MTP heads, and {path} has none."
            )
        if why := refusal(main.arch, self._name):
            raise ModelLoadError(f"The MTP heads of {path} cannot be used: {why}.")
        if n_heads > (most := FAMILIES[main.arch].n_mtp):
            raise ModelLoadError(
                f"The MTP heads of {path} cannot be used: it has {n_heads}, and llama.cpp computes "
                f"{most} of the architecture {main.arch}."
            )
        if model is main:
            return
        self._check_width(model, lib.llama_model_n_embd_out(model.handle))
        if (model.arch, model.info.n_layer) != (main.arch, main.info.n_layer):
            raise ModelLoadError(
                f"its heads are for a model of the architecture {model.arch} with "
                f"{model.info.n_layer} layers, and not {main.arch} with {main.info.n_layer}."
            )

    def _check_assistant(self, model: LlamaModel) -> None:
        """Raise ModelLoadError unless an assistant can read the KV cache of the model."""
        main = self._model
        if main.arch != ASSISTED[model.arch]:
            raise ModelLoadError(
                f"it is an assistant of models of the architecture {ASSISTED[model.arch]}, and not "
                f"{main.arch}."
            )
        if main.window:
            raise ModelLoadError("it reads all of the model's KV cache, so set swa_full.")
        self._check_width(model, lib.llama_model_n_embd_out(model.handle))
        for key in ("key_length", "key_length_swa", "value_length", "value_length_swa"):
            sizes = [one.metadata.get(f"{one.arch}.attention.{key}") for one in (model, main)]
            if sizes[0] != sizes[1]:
                raise ModelLoadError(f"its {key} is {sizes[0]}, and the model's is {sizes[1]}.")

    def _check_width(self, model: LlamaModel, width: int) -> None:
        if width != (wanted := lib.llama_model_n_embd_out(self._model.handle)):
            raise ModelLoadError(f"it is for models of the width {width}, and not {wanted}.")

    # -- heads that read layers of the model

    def separate(self, progress: Progress | None) -> HeadDrafter:
        """Make a drafter of an EAGLE-3 head, or of a model that guesses blocks."""
        own = draft_config(self._config, self._context)
        with loading(
            LlamaModel.load(own, progress=progress, is_head=True), "cannot make drafts"
        ) as model:
            layers = self._layers_for(model)
            check_vocabulary(model, self._model)
            make = self._eagle3 if self._name == "draft-eagle3" else self._blocks
            return make(model, own, layers)

    def _layers_for(self, model: LlamaModel) -> Sequence[int]:
        """Return the layers of the model that the head reads."""
        arch = "eagle3" if self._name == "draft-eagle3" else "dflash"
        functions, main = self._functions, self._model
        if model.arch != arch:
            raise ModelLoadError(f"it is of the kind {model.arch}, and not {arch}.")
        if why := refusal(main.arch, self._name):
            raise ModelLoadError(f"{why}.")
        pointer = functions.llama_model_target_layer_ids(model.handle)
        layers = list(pointer[: functions.llama_model_target_layer_ids_n(model.handle)])
        family, n_layers = FAMILIES[main.arch], main.info.n_layer
        n_inputs = n_layers + (family.gives_last if arch == "eagle3" else family.gives_end)
        if not layers or not all(0 <= layer < n_inputs for layer in layers):
            raise ModelLoadError(f"it reads the layers {layers}, but the model has {n_layers}.")
        if arch == "eagle3" and len(layers) != _EAGLE_LAYERS:
            raise ModelLoadError(f"it reads {len(layers)} layers, and should read {_EAGLE_LAYERS}.")
        width = model.metadata.get(f"{arch}.target_hidden_size", str(model.info.n_embd))
        if width != str(main.info.n_embd):
            raise ModelLoadError(f"it is for models of the width {width}, and not "
                                 f"{main.info.n_embd}.")  # fmt: skip
        return layers

    def _layer_rows(self, layers: Sequence[int]) -> Callable[[int], Sequence[Rows]]:
        """Have the model keep what goes into some layers; returns what reads it.

        What comes out of the last one is what goes into the layer after it. EAGLE-3 heads read it
        from another place.
        """
        functions, context, width = self._functions, self._context, self._model.info.n_embd
        last = self._model.info.n_layer if self._name == "draft-eagle3" else None
        for layer in layers:
            if layer == last:
                functions.llama_set_embeddings_nextn(context.handle, True, False)
            else:
                functions.llama_set_embeddings_layer_inp(context.handle, layer, True)

        def address(layer: int) -> int | None:
            if layer == last:
                found: int | None = functions.llama_get_embeddings_nextn(context.handle)
            else:
                found = functions.llama_get_embeddings_layer_inp(context.handle, layer)
            return found

        return lambda n_rows: [_rows_at(address(layer), n_rows, width) for layer in layers]

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

    def _blocks(self, model: LlamaModel, own: Config, layers: Sequence[int]) -> HeadDrafter:
        functions, metadata = self._functions, model.metadata
        kind = "draft-dspark" if model.has_tensor((b"markov_w1.weight",)) else "draft-dflash"
        if kind != self._name:
            raise ModelLoadError(f"it is for spec_type {kind!r}, and not {self._name!r}.")
        mask = lib.llama_vocab_mask(model.vocab.handle)
        if not 0 <= mask < model.vocab.n_tokens:
            raise ModelLoadError("its vocabulary has no mask token.")
        given = metadata.get("dflash.block_size", None if kind == "draft-dspark" else _BLOCK)
        if given is None or (size := whole_number(given, least=2)) is None:
            raise ModelLoadError(f"its blocks have {given or 'an unknown number of'} tokens.")
        is_first = kind == "draft-dspark" and metadata.get("dflash.sample_from_anchor") != "false"
        self._n_max = min(self._n_max, size - (not is_first))
        context = self._open(model, own, self._n_max + 1)
        n_candidates = functions.llama_model_dflash_selector_top_k(model.handle)
        functions.llama_set_embeddings_nextn(context.handle, True, not n_candidates)
        block = Block(
            mask=mask,
            first=0 if is_first else 1,
            hidden=_nextn_rows(functions, context, model.info.n_embd),
            n_candidates=n_candidates,
            says_how_sure=model.has_tensor((b"conf_proj.weight",)),
        )
        lib.llama_set_causal_attn(context.handle, metadata.get("dflash.attention.causal") == "true")
        read, width = self._layer_rows(layers), len(layers) * self._model.info.n_embd
        return BlockDrafter(
            self._head(context, read, (width, width), model),
            self._context,
            self._rules(model.max_n_ctx_seq(own)),
            block,
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
