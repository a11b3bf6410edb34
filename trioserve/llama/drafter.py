"""LlamaDrafter: guesses the next tokens of all slots with a draft model.

In each step the first decode takes the new tokens of the slots, and each later one a guess for
every slot that still has one::

    slot 0   held ................... | new | guess  guess  guess
    slot 1   held ..... | some of the new tokens ...
    slot 2   held ............. | new | guess

Slot 1 is behind: its prompt is long, and the draft model has not computed it yet. It catches up in
pieces, beside the others, so that no step becomes long. Until then it has no drafts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.config import Config
from trioserve.engine.backend import DraftRequest
from trioserve.errors import DecodeError, KVCacheFullError, ModelLoadError
from trioserve.llama.batch import LlamaBatch
from trioserve.llama.context import Context, Memory, open_context
from trioserve.llama.layout import Layout
from trioserve.llama.library import lib, short
from trioserve.llama.model import LlamaModel, Progress
from trioserve.log import get_logger
from trioserve.models import resolve
from trioserve.models.gguf import check_file
from trioserve.types import CacheRoot, TokenId
from trioserve.types.task import shared_length

#: With no more new tokens than this, a slot is not behind. A copy saves more than this, too.
FEW = 16


@attrs.define
class DraftText:
    """The KV sequence of a slot; both have the same number.

    ::

        held    | keys of the slot .......... | guesses, right or wrong |
                0                       n_agreed                 len(held)
    """

    id: int
    held: list[TokenId] = attrs.field(factory=list)
    root: CacheRoot = attrs.field(default=CacheRoot())
    n_agreed: int = 0  # keys that are known to be the slot's; more may be
    #: Of a recurrent model: how many keys it had before the last guesses, and the state then.
    before: tuple[int, bytes] = (0, b"")
    is_closed: bool = False  # no more drafts, until the slot has another text


class DraftTexts:
    """The sequences of the draft model's context."""

    def __init__(self, memory: Memory, n_seqs: int, *, can_cut: bool = True) -> None:
        self._memory, self._can_cut = memory, can_cut
        self._all = [DraftText(i) for i in range(n_seqs)]

    def follow(self, request: DraftRequest) -> DraftText:
        """Cut a slot's sequence to what it has in common with the slot's text, less the last key.

        If much is missing that the sequence of another slot has, it gets a copy of that.
        """
        text, keys = self._all[request.slot_id], request.keys
        if text.root != request.root:
            self.clear(text)
            text.root = request.root
        n_known = text.n_agreed
        maybe_shared = list(keys[n_known : len(text.held)])
        n_shared = n_known + shared_length(text.held[n_known:], maybe_shared)
        if len(keys) - n_shared > FEW:
            n_shared = self._copy_longer(text, keys, n_shared)
        n_shared = self._reachable(text, min(n_shared, len(keys) - 1))
        if n_shared < len(text.held):
            if self._can_cut or not n_shared:
                self._memory.remove(text.id, n_shared)
            elif not self._memory.rewind(text.id, *text.before):
                n_shared = 0
            del text.held[n_shared:]
        text.n_agreed = n_shared
        return text

    def _reachable(self, text: DraftText, length: int) -> int:
        """Return how many of the first `length` keys of a sequence it can be cut to."""
        if self._can_cut or length == len(text.held):
            return length
        return text.before[0] if text.before[0] <= length else 0

    def expect_guesses(self, text: DraftText) -> None:
        """Prepare for cutting the guesses that come next."""
        if not self._can_cut:
            text.before = len(text.held), self._memory.save(text.id, partial=True)

    def _copy_longer(self, text: DraftText, keys: Sequence[TokenId], n_shared: int) -> int:
        """Take over another sequence with a longer beginning of the keys; returns its length."""
        wanted = list(keys)
        alike = [other for other in self._all if other is not text and other.root == text.root]
        lengths = {
            other.id: self._reachable(other, shared_length(other.held, wanted)) for other in alike
        }
        best = max(lengths, key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < n_shared + FEW:
            return n_shared
        self._memory.remove(text.id, 0)
        self._memory.copy(best, text.id)
        text.held, text.before = list(self._all[best].held), self._all[best].before
        return lengths[best]

    def reopen(self, slot_id: int) -> None:
        """Note that a slot has another text. What it shares with the last one is found later."""
        text = self._all[slot_id]
        text.n_agreed, text.is_closed = 0, False

    def clear(self, text: DraftText) -> None:
        """Forget all of a text."""
        self._memory.remove(text.id, 0)
        text.held, text.n_agreed, text.before = [], 0, (0, b"")

    def check_integrity(self) -> None:
        """Raise AssertionError unless the texts agree with llama.cpp."""
        for text in self._all:
            assert self._memory.last(text.id) == len(text.held) - 1
            assert text.n_agreed <= len(text.held)

    def make_room(self, requests: Sequence[DraftRequest]) -> None:
        """Forget the texts of slots without a request.

        If these hold nothing, close one of the others: that which is most behind, or the longest.
        """
        in_use = {request.slot_id for request in requests}
        idle = [text for text in self._all if text.id not in in_use and text.held]
        for text in idle:
            self.clear(text)
        if not idle:
            wanting = [(request, self._all[request.slot_id]) for request in requests]
            _, text = max(wanting, key=lambda pair: _dispensable(*pair))
            self.clear(text)
            text.is_closed = True


def _dispensable(request: DraftRequest, text: DraftText) -> tuple[bool, bool, int]:
    n_held = len(text.held)
    n_missing = len(request.keys) - n_held
    is_behind = n_missing > FEW
    return not text.is_closed, is_behind, n_missing if is_behind else n_held


_log = get_logger("llama")

#: Seconds of a step in which slots that are behind catch up.
PIECE_S = 0.025
#: Share of a new time in an average, and the most that it may be of that average: something else
#: may have had the core.
_WEIGHT, _MOST = 0.25, 2.0


@attrs.frozen(kw_only=True)
class DraftRules:
    """Settings of drafts by a draft model.

    They have at most `n_max` tokens, and end before one that is less probable than `p_min`. Those
    with fewer than `n_min` are not used. A text has at most `n_ctx_seq` tokens. With
    `follows_threads`, the draft model computes with as many threads as the other one.
    """

    n_max: int
    n_min: int
    p_min: float
    n_ctx_seq: int
    follows_threads: bool = False

    @classmethod
    def of(cls, config: Config, n_ctx_seq: int, n_max: int | None = None) -> DraftRules:
        """Make them of a configuration, whose `n_max` may be too large for the drafter."""
        return cls(
            n_max=config.spec_draft_n_max if n_max is None else n_max,
            n_min=config.spec_draft_n_min,
            p_min=config.spec_draft_p_min,
            n_ctx_seq=n_ctx_seq,
            follows_threads=config.spec_draft_threads == config.spec_draft_threads_batch == -1,
        )


@attrs.frozen
class _Draft:
    """A draft that is being made."""

    text: DraftText
    n_max: int
    tokens: list[TokenId] = attrs.field(factory=list)


def average(old: float, new: float) -> float:
    """Learn from another time how long something takes; 0: not known."""
    return old + _WEIGHT * (min(new, _MOST * old) - old) if old else new


def most_probable(
    context: Context, shape: tuple[int, int], p_min: float, rows: Sequence[int] | None = None
) -> tuple[list[TokenId], list[float]]:
    """Find the best token in rows of logits of the last batch, and how probable it is.

    Args:
        context: has decoded the batch.
        shape: the number of rows with logits, and of the tokens in each.
        p_min: if it is 0, the probabilities are not computed, but 1.
        rows: which of them to look at; by default all.
    """
    first = short.llama_get_logits_ith(context.handle, context.rows.index(1))
    address = ctypes.addressof(first.contents)
    floats: Any = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
    logits: NDArray[np.float32] = np.frombuffer(floats, np.float32).reshape(shape)
    if rows is not None:
        logits = logits[rows]
    best = logits.argmax(axis=1)
    if p_min <= 0:
        return best.tolist(), [1.0] * len(best)
    largest = logits[np.arange(len(best)), best]
    probs = 1 / np.exp(logits - largest[:, None]).sum(axis=1)
    return best.tolist(), probs.tolist()


class LlamaDrafter:
    """Implements `trioserve.engine.backend.Drafter` with a separate model.

    Args:
        model: with the vocabulary of the model that it drafts for. It is closed with the drafter.
        context: of this model, with a sequence for each slot. It is closed, too.
        n_vocab: tokens of the other model's vocabulary; the draft model may know some more.
        rules: how drafts are made.
    """

    name = "draft-simple"
    is_free = False
    pays = True

    def __init__(
        self, model: LlamaModel, context: Context, n_vocab: int, rules: DraftRules
    ) -> None:
        self._model = model
        self._context = context
        self._rules = rules
        self.n_max = rules.n_max
        self.step_s = 0.0  # seconds to guess a token in all slots; 0: not known
        self._n_known = model.vocab.n_tokens
        self._n_shared = min(n_vocab, self._n_known)
        self._ends = model.vocab.end_of_generation
        self._batch = LlamaBatch(context.n_batch, n_vocab=self._n_known, n_seqs=context.n_seqs)
        self._texts = DraftTexts(context.memory, context.n_seqs, can_cut=model.can_cut)
        self._token_s = 0.0  # seconds to catch up by a token
        self._has_failed = False

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from now on, unless their number is configured."""
        if self._rules.follows_threads:
            self._context.set_threads(count)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[TokenId]]:
        """Guess the next tokens of each slot: those most probable for the draft model."""
        drafts: list[_Draft] = []
        try:
            if not self._has_failed:
                drafts = self._make(requests)
        except KVCacheFullError:
            self._texts.make_room(requests)
        except DecodeError as error:
            _log.error("the draft model has failed and is not used any more", reason=error.message)
            self._has_failed = True
        made = {draft.text.id: draft.tokens for draft in drafts}
        found = [made.get(request.slot_id, []) for request in requests]
        return [tokens if len(tokens) >= self._rules.n_min else [] for tokens in found]

    def _make(self, requests: Sequence[DraftRequest]) -> list[_Draft]:
        """Make drafts, and learn how long that takes."""
        started = monotonic()
        drafts = self._begin(requests)
        if not drafts:
            return []
        has_caught_up = len(self._batch) > 2 * len(drafts)
        self._extend(drafts)
        if not has_caught_up:
            n_steps = max(len(draft.tokens) for draft in drafts)
            self.step_s = average(self.step_s, (monotonic() - started) / max(1, n_steps))
        return drafts

    def forget(self, slot_id: int) -> None:
        """Expect another text in a slot."""
        self._texts.reopen(slot_id)

    def close(self) -> None:
        """Free the context and the model. Closing twice is fine."""
        self._context.close()
        self._model.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the drafter's texts agree with llama.cpp."""
        self._texts.check_integrity()

    # -- the first decode

    def _begin(self, requests: Sequence[DraftRequest]) -> list[_Draft]:
        """Decode the new tokens of the slots; returns the drafts that can be continued."""
        followed = [(request, self._texts.follow(request)) for request in requests]
        followed.sort(key=lambda pair: len(pair[0].keys) - len(pair[1].held))
        self._batch.clear()
        # Tokens that all slots that are behind may decode in a step, together.
        left = max(FEW + 1, int(PIECE_S / self._token_s)) if self._token_s else 2 * FEW
        added: list[tuple[DraftText, list[TokenId]]] = []
        drafts = []
        for request, text in followed:
            n_max = self._room(request, text)
            new = self._new_tokens(request, text, left) if n_max > 0 else []
            if not new:
                continue
            row = self._batch.extend(new, len(text.held), text.id)
            added.append((text, new))
            if len(new) > FEW:
                left -= len(new)
            if len(text.held) + len(new) == len(request.keys):
                self._batch.want_logits(row)
                drafts.append(_Draft(text, n_max))
        started = monotonic()
        self._decode(added)
        for draft in drafts:
            self._texts.expect_guesses(draft.text)
        n_tokens = len(self._batch)
        if n_tokens > FEW:  # fewer say too little about many
            self._token_s = average(self._token_s, (monotonic() - started) / n_tokens)
        return drafts

    def _room(self, request: DraftRequest, text: DraftText) -> int:
        """Return the most tokens that a draft may have."""
        if text.is_closed:
            return 0
        room = self._rules.n_ctx_seq - len(request.keys)
        return min(request.n_max, self._rules.n_max, room)

    def _new_tokens(self, request: DraftRequest, text: DraftText, left: int) -> list[TokenId]:
        """Return the part of a slot's text that is decoded in this step."""
        start = len(text.held)
        n_new = len(request.keys) - start
        if n_new > FEW:
            n_new = min(n_new, left)
        n_new = min(n_new, self._context.n_batch - len(self._batch))
        new = list(request.keys[start : start + n_new])
        if new and not 0 <= min(new) <= max(new) < self._n_known:
            text.is_closed = True  # it has a token that this model does not know
            return []
        return new

    # -- the guesses

    def _extend(self, drafts: list[_Draft]) -> None:
        """Guess the next token of each draft, until the last one ends."""
        while drafts:
            tokens, probs = most_probable(
                self._context, (len(drafts), self._n_known), self._rules.p_min
            )
            self._batch.clear()
            going_on = []
            for draft, token, prob in zip(drafts, tokens, probs, strict=True):
                if token >= self._n_shared or not prob >= self._rules.p_min:
                    continue
                draft.tokens.append(token)
                if len(draft.tokens) < draft.n_max and token not in self._ends:
                    self._batch.add(token, len(draft.text.held), draft.text.id, logits=True)
                    going_on.append(draft)
            self._decode([(draft.text, draft.tokens[-1:]) for draft in going_on])
            drafts = going_on

    def _decode(self, added: Sequence[tuple[DraftText, list[TokenId]]]) -> None:
        """Run the batch, which adds these tokens to their texts."""
        if added:
            self._context.decode(self._batch)
        for text, tokens in added:
            text.held += tokens


#: The sizes of the two vocabularies may differ by this many tokens, because some files are padded.
_MAX_EXTRA = 128
#: This many first tokens may differ: families name their control tokens differently.
_FIRST = 5


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
    target: LlamaModel, context: Context, config: Config, progress: Progress | None = None
) -> LlamaDrafter:
    """Load the draft model that `config` names, for a model that is loaded, with its context.

    Raises:
        ModelLoadError: it cannot be used, and the message names its file; or `progress` cancelled.
    """
    own = draft_config(config, context)
    with loading(LlamaModel.load(own, progress=progress), "cannot be the draft model") as model:
        check_vocabulary(model, target)
        drafts = open_context(model, own, n_scores=0)
    rules = DraftRules.of(config, min(drafts.n_ctx_seq, model.max_n_ctx_seq(own)))
    _log.info("draft model", path=model.info.path, n_max=rules.n_max)
    return LlamaDrafter(model, drafts, target.vocab.n_tokens, rules)


@contextmanager
def loading(model: LlamaModel, refusal: str) -> Iterator[LlamaModel]:
    """Close a model that drafts if the block fails; its ModelLoadError then names the file."""
    try:
        yield model
    except BaseException as error:
        model.close()
        if not isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{model.info.path} {refusal}: {error.message}") from error


def draft_config(config: Config, context: Context | Layout) -> Config:
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
        if field.metadata.get("group") in ("Drafts", "Media", "Speech")
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
        kv_unified=None if context.is_elastic else context.unified,
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


def check_vocabulary(model: LlamaModel, target: LlamaModel) -> None:
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


def _edges(model: LlamaModel) -> tuple[int | None, int | None]:
    """Return the tokens that are put before and after a text."""
    vocab = model.vocab
    ends = bool(lib.llama_vocab_get_add_eos(vocab.handle))
    return vocab.bos if model.info.add_bos else None, vocab.eos if ends else None


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace"))
