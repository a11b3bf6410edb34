"""Loading a draft model, and whether it fits the model that it drafts for."""

from __future__ import annotations

from typing import Any

import attrs
import structlog

from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama.context import Context, generation_params
from trioserve.llama.draft.drafter import DraftRules, LlamaDrafter
from trioserve.llama.library import lib
from trioserve.llama.model import Model, Progress, check_file
from trioserve.models import resolve

_log = structlog.get_logger("llama")

#: The sizes of the two vocabularies may differ by so much, because some files are padded.
_MAX_EXTRA = 128
#: The first tokens may differ: families give their control tokens other names.
_FIRST = 5
#: Kinds of drafts that go on from what the model computes inside, which it does not tell.
_HEADS = frozenset({"eagle3", "dflash", "gemma4-assistant"})


def divide(config: Config, progress: Progress) -> tuple[Progress, Progress]:
    """Divide a report of progress between a model and its draft model, by the sizes of the files.

    Raises:
        ModelLoadError: one of the files is not there.
    """
    paths = resolve(config.model), resolve(config.spec_draft_model)
    for path in paths:
        check_file(path)
    size, draft_size = (path.stat().st_size for path in paths)
    first = size / (size + draft_size)
    return lambda share: progress(share * first), lambda share: progress(
        first + share * (1 - first)
    )


def load_drafter(
    target: Model, context: Context, config: Config, progress: Progress | None = None
) -> LlamaDrafter:
    """Load the draft model that `config` names, for a model that is loaded, with its context.

    Raises:
        ModelLoadError: it cannot be used, and the message names its file; or `progress` cancelled.
    """
    if not target.can_cut:
        raise ModelLoadError(
            f"The model in {target.info.path} cannot have a draft model, because it cannot take "
            "back wrong guesses; with sliding windows, it can if you set swa_full."
        )
    own = draft_config(config, context)
    model = Model.load(own, progress=progress)
    try:
        _check_kind(model)
        _check_vocabulary(model, target)
        drafts = Context(model, generation_params(model, own))
    except BaseException as error:
        model.close()
        if not isinstance(error, ModelLoadError):
            raise
        path = model.info.path
        raise ModelLoadError(f"{path} cannot be the draft model: {error.message}") from error
    rules = DraftRules(
        n_max=config.spec_draft_n_max,
        n_min=config.spec_draft_n_min,
        p_min=config.spec_draft_p_min,
        n_ctx_seq=min(drafts.n_ctx_seq, model.max_n_ctx_seq(own)),
        follows_threads=config.spec_draft_threads == config.spec_draft_threads_batch == -1,
    )
    _log.info("draft model", path=model.info.path, n_max=rules.n_max)
    return LlamaDrafter(model, drafts, target.vocab.n_tokens, rules)


def draft_config(config: Config, context: Context) -> Config:
    """Make the configuration of the draft model.

    It is that of the other model, but for what the flags of the draft say. The context is as large
    and divided in the same way, with a sequence for each slot. Layers with a sliding window keep
    all of it, for drafts are cut all the time.
    """
    threads = config.spec_draft_threads
    threads_batch = config.spec_draft_threads_batch
    if threads_batch == -1:
        threads_batch = config.threads_batch if threads == -1 else threads
    own: dict[str, Any] = {
        field.name: field.default
        for field in attrs.fields(Config)
        if field.metadata.get("group") in ("Drafts", "Media")
    }
    own.update(
        hf_repo=None,
        hf_file=None,
        model_url=None,
        model=config.spec_draft_model,
        alias=None,
        lora=(),
        control_vector=(),
        ctx_size=context.n_ctx,
        kv_unified=context.unified,
        cache_seqs=0,
        swa_full=True,
        threads=config.threads if threads == -1 else threads,
        threads_batch=threads_batch,
        cache_type_k=config.spec_draft_type_k,
        cache_type_v=config.spec_draft_type_v,
        n_gpu_layers=config.spec_draft_ngl,
        rpc=(),  # a draft over the network would take longer than the token that it saves
        device=config.spec_draft_device or config.device,
        split_mode="layer" if len(config.spec_draft_device) == 1 else config.split_mode,
        override_tensor=config.spec_draft_override_tensor,
        cpu_moe=config.spec_draft_cpu_moe,
        n_cpu_moe=config.spec_draft_n_cpu_moe,
        n_cpu_ffn=0,
    )
    return attrs.evolve(config, **own)


def _check_kind(model: Model) -> None:
    """Raise ModelLoadError unless it writes text by itself, and what it wrote can be cut."""
    if model.arch in _HEADS:
        raise ModelLoadError(
            f"it is of the kind {model.arch}, which does not draft by itself; only models that "
            "generate text are supported."
        )
    if not model.can_cut:
        raise ModelLoadError(
            f"its architecture, {model.arch}, is recurrent, so wrong guesses cannot be taken back."
        )


def _check_vocabulary(model: Model, target: Model) -> None:
    """Raise ModelLoadError unless both models have the same tokens, as llama-server demands."""
    own, other = model.vocab.names, target.vocab.names
    if model.info.vocab_type != target.info.vocab_type:
        difference = "its tokenizer is of another kind"
    elif _edges(model) != _edges(target):
        difference = "it begins or ends a text with other tokens"
    elif abs(len(own) - len(other)) > _MAX_EXTRA:
        difference = f"it has {len(own)} tokens, and not {len(other)}"
    else:
        pairs = enumerate(zip(own, other, strict=False))
        wrong = next((i for i, (a, b) in pairs if a != b and i >= _FIRST), None)
        if wrong is None:
            return
        difference = f"token {wrong} is {_shown(own[wrong])}, and not {_shown(other[wrong])}"
    raise ModelLoadError(
        f"its vocabulary is not that of the model in {target.info.path}: {difference}."
    )


def _edges(model: Model) -> tuple[int | None, int | None]:
    """Return the tokens that are put before and after a text."""
    vocab = model.vocab
    ends = bool(lib.llama_vocab_get_add_eos(vocab.handle))
    return vocab.bos if model.info.add_bos else None, vocab.eos if ends else None


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace"))
