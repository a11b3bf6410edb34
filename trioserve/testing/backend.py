"""A backend that follows a script, and checks every call as llama.cpp would, or more strictly."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trioserve.chat.template.builtin import CHATML
from trioserve.engine.backend import Drafter, EmbeddingBackend, MediaPiece
from trioserve.engine.rollback import Rollback
from trioserve.engine.speaker import SpeechBackend
from trioserve.errors import (
    DecodeInterruptedError,
    InvalidRequestError,
    KVCacheFullError,
    TrioServeError,
)
from trioserve.testing.batch import ScriptedBatch, check_evenness
from trioserve.testing.projector import ChunkLog, ScriptedProjector, embeddings_of
from trioserve.testing.vocab import EOS, ScriptedConstraint, byte_vocab
from trioserve.types import (
    AdapterInfo,
    Adapters,
    CacheRoot,
    Candidates,
    CellKey,
    Constraint,
    Grammar,
    ModelInfo,
    PromptScores,
    SamplingParams,
    SlotState,
    TokenId,
    TokenProb,
    TokenProbs,
)

Script = Callable[[str], str]


def parrot(prompt: str) -> str:
    """Answer with the prompt, in capitals."""
    return prompt.upper()


def _like(name: str) -> Any:
    """Make a field that is like another one by default."""
    return attrs.field(default=attrs.Factory(operator.attrgetter(name), takes_self=True))


def _backwards(backend: ScriptedBackend) -> Rollback:
    return Rollback(n_max=backend.n_ctx_seq if backend.can_cut else 0)


@attrs.define(eq=False, slots=False, kw_only=True)
class ScriptedBackend:
    """A backend whose output is ``script(prompt)``, one byte a token.

    With LoRA adapters in use, the output begins with ``<id:scale>`` for each.

    It keeps the KV cache as lists of tokens, and asserts on every decode that positions are
    consecutive. A sampler asserts that the cache holds its output so far. Together they catch any
    mistake in an engine's bookkeeping.

    The arguments are the script and, by name, `n_slots`, `n_seqs`, `n_ctx`, `n_ctx_seq`, `n_batch`,
    `is_elastic`, `n_ctx_copies`, `can_cut`, `cuttable`, `window`, `sliding_window`, `rollback`,
    `chat_template`, `adapters`, `drafters`, `projector`, `embedding_pooling`, `embedder` and
    `speaker`.

    Without `can_cut` it is like a hybrid model: beside its cells, which can be cut, each sequence
    has a state, which cannot. A decode asserts that the state has seen the tokens in the cells, and
    that no other sequence uses it: this catches an engine that mixes up checkpoints.

    Attributes:
        sequences: the tokens of each KV sequence, and the keys of its media cells.
        chunks: the chunks of the media cells.
        made_with: the adapters that each of them was computed with.
        current_adapters: those in use.
        n_decodes: how often `decode` and `decode_media` were called.
        n_new: how many cells the last one was to fill.
        n_samplers: samplers that are not closed.
        samplers: those that know the sequence they are for, by its id.
        fail_next: raised by the next `decode`, in place of decoding.
        interrupted: whether the decode that runs, or the next one, ends without an effect.
        on_decode: called with the backend before each decode.
        on_compile: called with each grammar, in the thread that compiles it.
        n_forced: returns how many of the next tokens the grammar of an output so far forces.
        on_rewind: returns whether a `rewind` succeeds.
        memory: the backend itself, which keeps the KV cache.
        n_checkpoints: how many checkpoints were saved.
        n_decoded: how many tokens were decoded, all together.
        thread_choices: the numbers of threads to choose from; by default only one.
        threads: the numbers of threads that were set.
    """

    script: Script = attrs.field(default=parrot, kw_only=False)
    n_slots: int = 2
    n_seqs: int = _like("n_slots")
    n_ctx: int = 1024
    n_ctx_seq: int = _like("n_ctx")
    n_batch: int = 64
    is_elastic: bool = False
    n_ctx_copies: int = 0
    can_cut: bool = True
    cuttable: int = 0
    window: int = 0
    sliding_window: int = 0
    rollback: Rollback = attrs.Factory(_backwards, takes_self=True)
    chat_template: str | None = CHATML
    adapters: Sequence[AdapterInfo] = ()
    drafters: Sequence[Drafter] = ()
    projector: ScriptedProjector | None = None
    embedding_pooling: str | None = None
    embedder: Callable[[], EmbeddingBackend] = attrs.field(default=None)
    speaker: Callable[[], SpeechBackend] | None = None

    def __attrs_post_init__(self) -> None:
        self.current_adapters: Adapters = ()
        self.vocab = byte_vocab
        self.n_outputs = self.n_score_rows = self.n_batch
        if self.can_cut:
            self.cuttable = self.n_ctx_seq
        self.spare_ram: int | None = None
        self.n_spare_cores = 0
        self.thread_choices = (range(1, 2), range(1, 2))
        self.threads: list[int] = []
        self.unified = self.n_ctx_seq == self.n_ctx and not self.is_elastic
        self.batch = ScriptedBatch(self.n_batch)
        self.memory = self
        self.sequences: list[list[CellKey]] = [[] for _ in range(self.n_seqs)]
        self.chunks = ChunkLog()
        self.made_with: list[list[Adapters]] = [[] for _ in range(self.n_seqs)]
        self._sets: list[Adapters] = [()]  # all adapters that were ever used
        self._cells: list[list[int]] = [[] for _ in range(self.n_seqs)]
        self._next_cell = itertools.count()
        #: Tokens, and their adapters, that the state of each sequence has seen.
        self._seen: list[list[int]] = [[] for _ in range(self.n_seqs)]
        self._n_new = [0] * self.n_seqs  # cells of each that the last decode has added
        self._borrowed: set[int] = set()  # sequences whose state is another one's, too
        self._sources: set[int] = set()  # of copies that wait for the next decode
        self._targets: set[int] = set()
        self.n_forced: Callable[[str], int] = lambda _: 0
        self.on_rewind: Callable[[], bool] = lambda: True
        self.n_checkpoints = 0
        self.n_decoded = 0
        #: Of the last decode, by row: the sequence, and how many tokens it has with that row.
        self.logits: dict[int, tuple[int, int]] = {}
        self.n_decodes = self.n_new = 0
        self.n_samplers = 0
        self.samplers: dict[int, ScriptedSampler] = {}
        self.closed = False
        self.fail_next: TrioServeError | None = None
        self.interrupted = False
        self.on_decode: Callable[[ScriptedBackend], None] | None = None
        self.on_compile: Callable[[Grammar], None] | None = None
        self.on_adapter: Callable[[Path], None] | None = None
        self.info = ModelInfo(
            name="scripted",
            path="",
            description="a script",
            ftype="none",
            n_params=0,
            size=0,
            n_vocab=byte_vocab.n_tokens,
            n_ctx_train=self.n_ctx,
            n_embd=0,
            n_layer=0,
            vocab_type=2,
            chat_template=self.chat_template,
            bos_token="",
            eos_token="",
            add_bos=False,
            modified=0,
        )

    @property
    def n_cells(self) -> int:
        """The number of cells of the KV cache in use; a copy shares the cells of its source.

        The cells of a window are in a separate cache of the same size, and are not shared.
        """
        windows = sum(min(len(tokens), self.window) for tokens in self.sequences)
        return max(len(set().union(*self._cells)), windows)

    def set_adapters(self, adapters: Adapters) -> None:
        assert all(0 <= id_ < len(self.adapters) and scale for id_, scale in adapters)
        assert adapters != self.current_adapters, "these adapters are already set"
        self.current_adapters = adapters
        if adapters not in self._sets:
            self._sets.append(adapters)

    def try_adapter(self, path: Path) -> None:
        if self.on_adapter is not None:
            self.on_adapter(path)

    def add_adapter(self, path: Path) -> int:
        self.adapters = (*self.adapters, AdapterInfo(path=str(path), scale=0.0))
        return len(self.adapters) - 1

    def remove_adapter(self, id_: int) -> None:
        assert all(id_ != used for used, _ in self.current_adapters)
        kept = list(self.adapters)
        kept[id_] = AdapterInfo(path="")
        self.adapters = tuple(kept)

    def set_threads(self, count: int) -> None:
        assert any(count in choices for choices in self.thread_choices)
        assert self.threads[-1:] != [count], "this number is already set"
        self.threads.append(count)

    def decode(self) -> None:
        """Append the batch to the sequences, or raise the scripted error."""
        rows = self.batch.rows
        assert sum(row[-1] for row in rows) <= self.n_outputs + self.n_score_rows, "too many logits"
        self._begin_decode(len(rows), {seq for _, _, seq, _ in rows})
        self._n_new = [0] * self.n_seqs
        check_evenness(rows, self.rollback)
        for row, (token, pos, seq, logits) in enumerate(rows):
            assert 0 <= token < self.vocab.n_tokens
            held = self.sequences[seq]
            assert pos == self._positions(seq)[-1], f"position {pos} does not follow"
            assert self.chunks.is_border(held), "a token within a chunk"
            self._append(seq, token)
            if logits:
                self.logits[row] = seq, len(held)

    def decode_media(self, pieces: Sequence[MediaPiece]) -> list[int]:
        """Append chunks, or parts of them, to the sequences, or raise the scripted error."""
        n_cells = sum(piece.stop - piece.start for piece in pieces)
        assert self.projector is not None, "there is no projector"
        assert 0 < n_cells <= self.n_batch, "more than a batch"
        self._begin_decode(n_cells, {piece.seq for piece in pieces})
        row, rows = -1, []
        for piece in pieces:
            chunk, held = piece.chunk, self.sequences[piece.seq]
            assert 0 <= piece.start < piece.stop <= chunk.n_cells
            whole = piece.start == 0 and piece.stop == chunk.n_cells
            assert chunk.is_causal or (whole and len(pieces) == 1), "a part of an image"
            made = embeddings_of(chunk, self.projector.n_embd)
            assert np.array_equal(piece.embeddings, made), "embeddings of something else"
            before = held[: len(held) - piece.start]
            assert held[len(before) :] == list(chunk.keys[: piece.start]), "a piece is missing"
            assert self.chunks.is_border(before), "a chunk within another"
            assert piece.pos == self.chunks.positions(before)[-1], "a chunk at another position"
            assert piece.stop == chunk.n_cells or not piece.logits, "logits within a chunk"
            self.chunks.add(chunk)
            for key in chunk.keys[piece.start : piece.stop]:
                self._append(piece.seq, key)
            row += piece.stop - piece.start
            rows.append(row)
            if piece.logits:
                self.logits[row] = piece.seq, len(held)
        return rows

    def _positions(self, seq: int) -> Sequence[int]:
        """The position of each cell of a sequence, and of the next one."""
        held = self.sequences[seq]
        return range(len(held) + 1) if self.projector is None else self.chunks.positions(held)

    def _append(self, seq: int, key: CellKey) -> None:
        self.sequences[seq].append(key)
        assert len(self.sequences[seq]) <= self.n_ctx_seq, "the sequence is full"
        self.made_with[seq].append(self.current_adapters)
        self._cells[seq].append(next(self._next_cell))
        self._seen[seq].append(self._values(seq, len(self.sequences[seq]) - 1)[0])
        self._n_new[seq] += 1

    def _begin_decode(self, n_cells: int, seqs: set[int]) -> None:
        """Raise the scripted error, or the one that llama.cpp would raise."""
        assert not self.closed, "the backend is closed"
        self.n_decodes += 1
        self.n_new = n_cells
        if self.on_decode is not None:
            self.on_decode(self)
        interrupted, self.interrupted = self.interrupted, False
        if interrupted:
            raise DecodeInterruptedError("interrupted")
        failure, self.fail_next = self.fail_next, None
        if failure is not None:
            raise failure
        if self.n_cells + n_cells > self.n_ctx + self.n_ctx_copies:
            raise KVCacheFullError("no free cells")
        assert n_cells, "an empty batch"
        self.logits = {}
        self.n_decoded += n_cells
        self._sources.clear()
        self._targets.clear()
        for seq in seqs:
            assert seq not in self._borrowed, "two sequences write to one state"
            assert self.can_cut or self._seen[seq] == self._values(seq), "a state of another text"

    def interrupt(self) -> None:
        self.interrupted = self.can_cut

    def score(self, scores: PromptScores, row: int, tokens: Sequence[TokenId]) -> None:
        """Make a token the less probable, the further it is in its text and the higher its id."""
        for i, token in enumerate(tokens, start=row):
            seq, n_held = self.logits.pop(i)
            assert self.sequences[seq][n_held : n_held + 1] in ([], [token]), "another token's row"
            logprob = -(n_held + token / 256)
            best = [(id_, logprob - id_) for id_ in range(scores.n_top)]
            scores.add(token, logprob, scores.n_top + 1, best)

    def check_sampling(self, params: SamplingParams) -> None:
        for token, _bias in params.logit_bias:
            if not 0 <= token < self.vocab.n_tokens:
                raise InvalidRequestError(f"There is no token {token}.", param="logit_bias")

    def compile(self, grammar: Grammar, owner: str = "") -> ScriptedConstraint:
        if self.on_compile is not None:
            self.on_compile(grammar)
        return ScriptedConstraint(grammar)

    def sampler(
        self,
        params: SamplingParams,
        prompt: Sequence[TokenId],
        constraint: Constraint | None = None,
    ) -> ScriptedSampler:
        assert constraint is None or isinstance(constraint, ScriptedConstraint)
        self.n_samplers += 1
        return ScriptedSampler(self, prompt, constraint)

    def remove(self, seq: int, start: int) -> bool:
        """Cut a sequence; in the middle only if `can_cut`, or if it has few cells."""
        can_cut = len(self.sequences[seq]) <= self.cuttable or (
            self.sliding_window > 0 and self.first(seq) <= max(0, start - self.sliding_window)
        )
        # A state goes back by as many tokens as the last decode has added, once.
        n_back, self._n_new[seq] = min(self._n_new[seq] - 1, self.rollback.n_max), 0
        if 0 < start <= self.last(seq) - n_back and not can_cut:
            return False
        length = bisect_left(self._positions(seq)[:-1], start)  # in cells
        assert self.chunks.is_border(self.sequences[seq][:length]), "a chunk is cut"
        self._cut(seq, length)
        del self._seen[seq][length:]
        if not start:
            self._borrowed.discard(seq)
        return True

    def _cut(self, seq: int, start: int) -> None:
        del self.sequences[seq][start:]
        del self.made_with[seq][start:]
        del self._cells[seq][start:]

    def trim(self, seq: int, n_cells: int) -> None:
        """Forget the memory behind the first cells, which must be empty."""
        assert n_cells >= len(self.sequences[seq]), "cells are lost that are in use"

    def copy(self, source: int, target: int) -> None:
        assert not self.is_elastic, "a copy of a whole part, which is as long as the context"
        assert not self.sequences[target], "the target is not empty"
        self.sequences[target] = list(self.sequences[source])
        self.made_with[target] = list(self.made_with[source])
        self._cells[target] = list(self._cells[source])
        self._seen[target] = list(self._seen[source])
        if self.unified:
            self._borrowed |= {target} if not self.cuttable else set()
        else:  # sequences share no cells
            self._cells[target] = [next(self._next_cell) for _ in self._cells[source]]
            self._sources.add(source)
            self._targets.add(target)

    def step_back(self, seq: int, token: TokenId) -> bool:
        return False

    def size(self, seq: int, *, partial: bool = False) -> int:
        """Size of a saved state: four bytes per token."""
        return 4 * len((self._seen if partial else self.sequences)[seq])

    def save(self, seq: int, *, partial: bool = False) -> bytes:
        """Save the tokens and their adapters, or, with `partial`, what the state has seen."""
        if partial:
            assert not self.can_cut, "a checkpoint where sequences can be cut"
            assert not self._targets, "a copy waits for the next decode"
            self.n_checkpoints += 1
            return array("i", self._seen[seq]).tobytes()
        assert seq not in self._targets, "a copy waits for the next decode"
        values = self._values(seq)
        assert self.can_cut or self._seen[seq] == values, "a state of another text"
        return array("i", values).tobytes()

    def _values(self, seq: int, start: int = 0) -> list[int]:
        """Encode the tokens in the cells from `start` on, with their adapters."""
        sets = (self._sets.index(adapters) << 16 for adapters in self.made_with[seq][start:])
        numbers = map(self.chunks.number, self.sequences[seq][start:])
        return list(map(operator.or_, numbers, sets))

    def restore(self, seq: int, data: bytes) -> None:
        assert not self.sequences[seq], "the sequence is not empty"
        assert seq not in self._sources | self._targets, "a copy waits for the next decode"
        values = array("i", data)
        self._seen[seq] = list(values)
        self.sequences[seq] = [self.chunks.key(value & 0xFFFF) for value in values]
        self.made_with[seq] = [self._sets[value >> 16] for value in values]
        self._cells[seq] = [next(self._next_cell) for _ in self.sequences[seq]]
        assert self.is_elastic or self.n_cells <= self.n_ctx, "no free cells"

    def rewind(self, seq: int, length: int, data: bytes) -> bool:
        """Cut a sequence to `length` positions, if the state is from there."""
        assert not self.can_cut, "a checkpoint where sequences can be cut"
        assert not self._targets, "a copy waits for the next decode"
        self._borrowed.discard(seq)
        self._seen[seq] = list(array("i", data))
        n_cells = bisect_left(self._positions(seq)[:-1], length)
        assert 0 < n_cells == len(self._seen[seq]) <= len(self.sequences[seq])
        self._cut(seq, n_cells if self.on_rewind() else 0)
        del self._seen[seq][len(self.sequences[seq]) :]
        return bool(self.sequences[seq])

    def state_identity(self) -> tuple[str, tuple[str, ...]]:
        shape = f"{self.can_cut} {self.unified} {self.n_seqs if not self.unified else 1}"
        digest = hashlib.blake2b(shape.encode(), digest_size=16).hexdigest()
        return digest, tuple(one.path for one in self.adapters)

    def write_state(self, path: Path, saved: SlotState) -> int:
        content = {"keys": saved.keys, "root": saved.root, "state": saved.state.hex()}
        return path.write_text(json.dumps(content))

    def read_state(self, path: Path, adapters: Adapters) -> tuple[SlotState, int]:
        text = path.read_text()
        try:
            content = json.loads(text)
        except ValueError:
            raise InvalidRequestError("The file is not of a script.") from None
        used, owner, salt = content["root"]
        state = SlotState(
            keys=tuple(content["keys"]),
            root=CacheRoot(tuple((id_, scale) for id_, scale in used), owner, salt),
            state=bytes.fromhex(content["state"]),
        )
        return state, len(text)

    def first(self, seq: int) -> int:
        """The begin of the window, which forgets cells that are more than twice its size back."""
        n_positions = len(self.sequences[seq])
        if not self.sliding_window:
            return n_positions - 1
        return max(0, n_positions - 2 * self.sliding_window)

    def last(self, seq: int) -> int:
        n_cells = min(len(self.sequences[seq]), len(self._seen[seq]))
        return self._positions(seq)[n_cells - 1] if n_cells else -1

    def close(self) -> None:
        self.closed = True


class ScriptedSampler:
    """Generates the script's reply to the prompt, byte by byte, and then EOS."""

    def __init__(
        self,
        backend: ScriptedBackend,
        prompt: Sequence[TokenId],
        constraint: ScriptedConstraint | None = None,
    ) -> None:
        self._backend = backend
        self._constraint = constraint
        self._tokens = list(prompt)
        self._prompt: list[CellKey] | None = None  # as it is in the KV cache, with media
        self._said: list[TokenId] = []
        self._adapters = backend.current_adapters
        self._reply = b""
        if backend.projector is None:
            self._read(self._tokens)
        self._seq: int | None = None  # that it is attached to
        self.closed = False

    def _read(self, prompt: list[CellKey]) -> None:
        """Ask the script. With media, the prompt is known only from the KV cache."""
        assert [key for key in prompt if key >= 0] == self._tokens, "the prompt is another one"
        self._prompt = prompt
        reply = self._backend.script(self._backend.chunks.text(prompt))
        adapters = "".join(f"<{id_}:{scale:g}>" for id_, scale in self._adapters)
        self._reply = bytes(self._said) + (adapters + reply).encode()

    def attach(self, seq: int) -> None:
        assert not self.closed and self._seq in (None, seq), "in two sequences"
        assert self._backend.samplers.setdefault(seq, self) is self, "two for a sequence"
        self._seq = seq

    def detach(self) -> None:
        if self._seq is not None:
            del self._backend.samplers[self._seq]
            self._seq = None

    def sample(self, row: int) -> TokenId:
        """Check the KV sequence of the row, and return the next token of the reply."""
        assert not self.closed, "the sampler is closed"
        assert row in self._backend.logits, f"row {row} has no logits"
        seq, n_held = self._backend.logits[row]
        assert self._seq in (None, seq), "the sampler is attached to another sequence"
        held = self._backend.sequences[seq][:n_held]
        made_with = set(self._backend.made_with[seq])
        assert made_with == {self._adapters}, "the KV cache was computed with other adapters"
        if self._prompt is None:
            self._read(held[: len(held) - len(self._said)])
        assert self._prompt is not None
        text = self._prompt + self._said
        n_same = len(held) if len(held) == len(text) else len(held) // 2  # it was shifted
        assert held[-n_same:] == text[-n_same:], "the KV cache holds another text"
        n_said = len(self._said)
        token = self._reply[n_said] if n_said < len(self._reply) else EOS
        self._said.append(token)
        if token == EOS and self._constraint is not None:
            self._constraint.check(self._reply.decode())
        return token

    def sample_with_probs(self, row: int, n: int, *, post: bool) -> tuple[TokenId, TokenProbs]:
        token = self.sample(row)
        return token, self.probs(row, token, n, post=post)

    def accept(self, token: TokenId) -> None:
        """Insert a token into the reply; the script continues after it."""
        n_said = len(self._said)
        self._reply = self._reply[:n_said] + bytes([token]) + self._reply[n_said:]
        self._said.append(token)

    def forced(self, n_max: int) -> list[TokenId]:
        n_said = len(self._said)
        rest = self._reply[n_said:]
        tokens = list(rest[: min(n_max, self._backend.n_forced(self._reply[:n_said].decode()))])
        self._said += tokens
        return tokens

    def probs(self, row: int, token: TokenId, n: int, *, post: bool) -> TokenProbs:
        chosen = TokenProb(token, byte_vocab.pieces[token], 0.0)
        return TokenProbs(chosen, Candidates.of(*[chosen] * min(n, 1)))

    def close(self) -> None:
        if not self.closed:
            self.detach()
            self.closed = True
            self._backend.n_samplers -= 1
