"""Context: the KV cache, its sequences, and the buffers that decoding needs.

In a KV cache for all sequences (unified), a copy marks the same cells as belonging to both. In one
with a part for each (split), llama.cpp copies the whole part, at the next decode.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trioserve.config import Config
from trioserve.engine.rollback import Rollback
from trioserve.errors import (
    DecodeError,
    DecodeInterruptedError,
    EngineError,
    InvalidRequestError,
    KVCacheFullError,
    ModelLoadError,
)
from trioserve.llama import library
from trioserve.llama.layout import CACHE_TYPES, Layout, check_memory, choose, snapshots
from trioserve.llama.lazy_pages import KVPages, LazyPages, NotLazyError
from trioserve.llama.library import HandleOwner, lib, short
from trioserve.llama.machine import HugePages, allowed_cpus, cpu_quota, physical_cores
from trioserve.llama.model import LlamaModel
from trioserve.log import get_logger


class Interrupt:
    """Keep it as long as its context."""

    def __init__(self) -> None:
        #: Of two bytes; the first is not 0 while a decode is to end.
        self.flag = ctypes.create_string_buffer(2)
        libc = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
        address = ctypes.cast(libc.strlen, ctypes.c_void_p).value
        self.callback = lib.ggml_abort_callback(address)
        self._lock = threading.Lock()
        self._is_held = False

    def install(self, params: Any) -> None:
        """Have contexts made with these parameters check the flag."""
        params.abort_callback = self.callback
        params.abort_callback_data = ctypes.addressof(self.flag)

    def set(self) -> None:
        """End the decode that runs, or else the next one."""
        with self._lock:
            if not self._is_held:
                self.flag[0] = b"!"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ignore interrupts in this block: decodes run to their end."""
        with self._lock:
            self._is_held = True
            self.flag[0] = b"\0"
        try:
            yield
        finally:
            self._is_held = False

    def is_set(self) -> bool:
        """Return True while a decode is to be interrupted."""
        return self.flag[0] != b"\0"


_log = get_logger("llama")

#: Makes an uninitialized bytes object of a given size. Zeroing or copying it would double the time
#: it takes to save a state.
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_new_bytes.restype = ctypes.py_object


class Memory:
    """The sequences of a context; ids run from 0 to ``n_seqs - 1``. Belongs to its `Context`.

    Raises:
        EngineError: from every method, when a sequence does not exist or the context is closed.
    """

    def __init__(
        self,
        context: Any,
        n_seqs: int,
        *,
        unified: bool,
        pages: KVPages | None = None,
        is_compressed: bool = False,
    ) -> None:
        self._context: Any = context
        self._handle: Any = lib.llama_get_memory(context)
        self._n_seqs = n_seqs
        self._unified = unified
        self._pages = pages
        #: Keys of several tokens are in a part of each sequence, even in a unified cache: what
        #: llama.cpp copies with the next decode would replace what is restored before.
        self._is_compressed = is_compressed
        #: Copies wait for the next decode: from some sequences and to others.
        self.is_copying = False
        self._sources: set[int] = set()
        self._targets: set[int] = set()

    def close(self) -> None:
        """Forget the pointers; the context frees what they point to."""
        self._context = self._handle = None

    def settle(self) -> None:
        """Note that a decode has run, which completes pending copies."""
        self.is_copying = False
        self._sources.clear()
        self._targets.clear()

    def remove(self, seq: int, start: int) -> bool:
        """Remove the positions of a sequence from `start` on; returns whether it could.

        Removing a whole sequence never fails.
        """
        self._check(seq)
        return bool(lib.llama_memory_seq_rm(self._handle, seq, max(0, start), -1))

    def trim(self, seq: int, n_cells: int) -> None:
        """Give back the memory of a sequence behind its first `n_cells` cells, where possible."""
        self._check(seq)
        if self._pages is not None:
            self._pages.trim(seq, n_cells)

    def copy(self, source: int, target: int) -> None:
        """Copy a whole sequence over an empty one.

        Raises:
            EngineError: the target is not empty, or is the source.
        """
        self._check(source)
        if self.last(target) != -1:
            raise EngineError(
                f"Sequence {target} is not empty, so it cannot be overwritten by a copy."
            )
        if source != target and self._is_compressed:
            self.restore(target, self.save(source))
        elif source != target:
            # Both bounds must be open: a copy between two parts must be of the whole sequence.
            lib.llama_memory_seq_cp(self._handle, source, target, -1, -1)
            if not self._unified:
                self.is_copying = True
                self._sources.add(source)
                self._targets.add(target)

    def step_back(self, seq: int, token: int) -> bool:
        """Return that no token has to be computed again: the context keeps no rows."""
        self._check(seq)
        return False

    def last(self, seq: int) -> int:
        """The last position that a sequence holds, -1 when it is empty."""
        self._check(seq)
        return int(short.llama_memory_seq_pos_max(self._handle, seq))

    def first(self, seq: int) -> int:
        """Return the first position from which on all is there, -1 when it is empty."""
        self._check(seq)
        return int(short.llama_memory_seq_pos_min(self._handle, seq))

    def size(self, seq: int, *, partial: bool = False) -> int:
        """Return the number of bytes that `save` would return."""
        self._check(seq)
        return int(lib.llama_state_seq_get_size_ext(self._context, seq, int(partial)))

    def save(self, seq: int, *, partial: bool = False) -> bytes:
        """Return a sequence's state, for `restore`; `partial`: only the part that cannot be cut.

        That is the sliding window or the recurrent state, and of plain attention nothing.

        Raises:
            EngineError: a copy to it is pending until the next decode, or llama.cpp fails.
        """
        self._check(seq)
        if seq in self._targets:
            raise EngineError("A copied sequence is complete only after the next decode.")
        size = self.size(seq, partial=partial)
        data: bytes = _new_bytes(None, size)  # writable as long as there is no other reference
        target = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        written = lib.llama_state_seq_get_data_ext(self._context, target, size, seq, int(partial))
        if not 0 < written <= size:
            why = library.reason(library.take_errors())
            raise EngineError(f"Sequence {seq} cannot be saved: {why}.")
        return data if written == size else data[:written]

    def restore(self, seq: int, data: bytes, *, partial: bool = False) -> None:
        """Replace a sequence's state by a result of `save`, in part if that is partial.

        The data must come from `save` of a context with the same model, cache types and kind of
        cache. It is trusted: llama.cpp checks its form, but not each position in it.

        Raises:
            InvalidRequestError: it does not fit; the sequence is then empty.
            EngineError: a copy from it or to it is pending until the next decode.
        """
        self._check(seq)
        if seq in self._sources | self._targets:
            raise EngineError("A sequence that is being copied cannot be filled.")
        source = np.frombuffer(data, dtype=np.uint8)
        pointer = source.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        library.take_errors()
        read = lib.llama_state_seq_set_data_ext(
            self._context, pointer, len(data), seq, int(partial)
        )
        if not read or read != len(data):
            why = "there are bytes after its end" if read else ""
            why = why or library.reason(library.take_errors())
            if "n_stream mismatch" in why:
                why = "its KV cache is divided in another way (-kvu, -no-kvu, or the slots of -np)"
            self.remove(seq, 0)
            raise InvalidRequestError(f"The saved state does not fit this model's context: {why}.")

    def rewind(self, seq: int, length: int, data: bytes) -> bool:
        """Put a sequence back to its first `length` positions.

        `data` is what `save` returned in part when it ended there. Returns whether it could; if
        not, the sequence is empty, and the log says why.

        Raises:
            EngineError: a copy from it or to it is pending until the next decode.
        """
        try:
            self.restore(seq, data, partial=True)
        except InvalidRequestError as error:
            _log.warning("a checkpoint cannot be used", reason=error.message)
            return False
        # Cut after that, for llama.cpp refuses to cut a state that is further on. And look before:
        # a window that is further on would be cut, and then lack what is behind it.
        if self.last(seq) == length - 1 and self.remove(seq, length):
            return True
        self.remove(seq, 0)
        _log.warning(
            "a checkpoint cannot be used", reason=f"it is not one after {length} positions"
        )
        return False

    def _check(self, seq: int) -> None:
        if not 0 <= seq < self._n_seqs:
            raise EngineError(f"There is no sequence {seq}; there are {self._n_seqs}.")
        if self._handle is None:
            raise EngineError("The context is closed.")


_ROPE_SCALINGS = {"auto": -1, "none": 0, "linear": 1, "yarn": 2}
ROPE_FIELDS = (
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_orig_ctx",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_slow",
    "yarn_beta_fast",
)
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


#: Rows with logits for the drafts of all slots: 39 MB with a vocabulary of 152,000 tokens.
DRAFT_ROWS = 64

#: Rows of a batch with logits for the scores of prompts. With fewer, each token of a long prompt
#: would take far longer; see `trioserve.engine.strategy.TILE`.
SCORE_ROWS = 64

#: Times that an elastic KV cache is allocated if its memory is not found.
_LAZY_ATTEMPTS = 3

#: `llama_decode` returns this when its callback ends it.
_INTERRUPTED = 2
_NOTHING = nullcontext[None]()


class AnyBatch(Protocol):
    """The input of a context: tokens, or embeddings in their place."""

    def seal(self) -> tuple[Any, bytes]:
        """Return the structure that `llama_decode` takes, and a byte for each row.

        That is 1 where logits were asked for.
        """

    def starts(self) -> dict[int, int]:
        """Return the first position of each sequence in it."""


class Context(HandleOwner):
    """A KV cache with its sequences, and the logits of the last batch.

    `handle` is llama.cpp's pointer. To be used by one thread at a time, and closed before its
    model.

    Raises:
        ModelLoadError: llama.cpp refuses the parameters, or there is not enough memory.
    """

    def __init__(self, model: LlamaModel, params: Any, layout: Layout | None = None) -> None:
        library.take_errors()
        self._can_cut = model.can_cut
        self._interrupt = Interrupt()
        self._interrupt.install(params)
        self.is_elastic = layout is not None and layout.is_elastic
        lazy = LazyPages(swa_full=params.swa_full) if self.is_elastic else None
        with library.listening(_on_huge_cache() if lazy is None else lazy.on_line):
            handle = lib.llama_init_from_model(model.handle, params)
        if handle is None:
            why = library.reason(library.take_errors())
            raise ModelLoadError(f"The context for {model.info.path} cannot be made: {why}.")
        try:
            pages = lazy.finish() if lazy is not None else None
        except NotLazyError:
            lib.llama_free(handle)
            raise
        self.handle: Any = handle
        #: Memory of the cache exists only where it was written to.
        self.is_lazy = pages is not None
        #: Cells that all sequences together may hold.
        self.n_ctx: int = lib.llama_n_ctx(handle)
        #: Cells beyond these that copies in an elastic cache may take.
        self.n_copies = 0
        if layout is not None and layout.is_elastic:
            self.n_ctx, self.n_copies = layout.n_ctx, layout.n_copies
        self.n_ctx_seq: int = lib.llama_n_ctx_seq(handle)
        self.n_batch: int = lib.llama_n_batch(handle)
        self.n_ubatch: int = lib.llama_n_ubatch(handle)
        self.n_seqs: int = lib.llama_n_seq_max(handle)
        self.n_outputs: int = params.n_outputs_max  # rows of a batch that may have logits
        #: Encoders have no cache: batches are independent, without logits.
        self.has_cache: bool = lib.llama_get_memory(handle) is not None
        #: One byte for each row of the last batch: 1 if it has logits.
        self.rows = b""
        #: All sequences share the cells. A single sequence has all of them anyway.
        self.unified = bool(params.kv_unified) or self.n_seqs == 1
        self.memory = Memory(
            handle,
            self.n_seqs,
            unified=bool(params.kv_unified),
            pages=pages,
            is_compressed=model.is_compressed,
        )
        #: The rules for taking back wrong guesses.
        self.rollback = self._rollback(model, params)

    def _rollback(self, model: LlamaModel, params: Any) -> Rollback:
        if not model.has_state:  # a physical batch overwrites no cell that its first row sees
            return Rollback(n_max=self.n_ctx_seq if model.can_cut else params.n_ubatch)
        if n_states := lib.llama_n_rs_seq(self.handle):
            return Rollback(n_max=n_states, n_together=self.n_ubatch)
        return Rollback(n_max=params.n_ubatch, needs_state=True)

    def decode(self, batch: AnyBatch, *, encodes: bool = False) -> None:
        """Run a batch. An empty one does nothing.

        With `encodes`, it runs through the model's encoder, which leaves the sequences alone.

        Raises:
            KVCacheFullError: not enough free cells; nothing has changed.
            DecodeInterruptedError: `interrupt` was called; nothing has changed.
            DecodeError: any other failure; the contents of the sequences are unknown.
        """
        if self.handle is None:
            raise EngineError("The context is closed.")
        self.rows, (sealed, rows) = b"", batch.seal()
        if not rows:
            return
        if rows.count(1) > self.n_outputs:  # llama.cpp would end the process
            raise EngineError(f"A batch has logits for at most {self.n_outputs} rows.")
        run = lib.llama_decode if self.has_cache and not encodes else lib.llama_encode
        # llama.cpp may divide a batch of several sequences, where it finds no other place for it.
        may_lose = not self._can_cut and self.has_cache and len(batch.starts()) > 1
        library.lines.are_expected = self._interrupt.is_set
        with self.uninterrupted() if may_lose else _NOTHING:
            code = run(self.handle, sealed)
        self._interrupt.flag[0] = b"\0"
        if code in (0, 1, _INTERRUPTED) and self.memory.is_copying:
            self.memory.settle()
        if code == 0:
            # A GPU may still be computing. Reading the outputs would wait while holding the GIL.
            lib.llama_synchronize(self.handle)
            self.rows = rows
            return
        why = library.reason(library.take_errors())
        if code == 1:
            raise KVCacheFullError(f"The KV cache has no room for a batch of {len(rows)} tokens.")
        # Finished parts of a batch stay, but for the physical batch that was interrupted. It is
        # cut, so that the batch can be run again. A sliding window cannot be cut, but it has lost
        # only what the next position does not see.
        if code == _INTERRUPTED and (
            not self.has_cache
            or all(
                self.memory.last(seq) < start or self.memory.remove(seq, start)
                for seq, start in batch.starts().items()
            )
        ):
            raise DecodeInterruptedError("The decode was interrupted.")
        raise DecodeError(f"{run.__name__} failed with code {code}: {why}.")

    def logits(self, row: int, n_tokens: int) -> NDArray[np.float32]:
        """Return a view of a row's logits, of a vocabulary of `n_tokens`; valid until `decode`."""
        pointer = short.llama_get_logits_ith(self.handle, row)
        address = ctypes.addressof(pointer.contents)
        floats: Any = (ctypes.c_float * n_tokens).from_address(address)
        view: NDArray[np.float32] = np.frombuffer(floats, dtype=np.float32)
        return view

    def set_threads(self, count: int) -> None:
        """Compute with `count` threads from the next `decode` on."""
        lib.llama_set_n_threads(self.handle, count, count)

    def interrupt(self) -> None:
        """End the `decode` that runs, or else the next one. From any thread.

        Not with a recurrent or hybrid model, whose states would be lost. With a sliding window, it
        ends only decodes of a single sequence.
        """
        self._interrupt.set()

    def uninterrupted(self) -> AbstractContextManager[None]:
        """Let decodes run to their end in this block; `interrupt` does nothing."""
        return self._interrupt.held()

    def close(self) -> None:
        """Free it. Closing twice is fine."""
        handle, self.handle = self.handle, None
        self.rows = b""
        if handle is not None:
            self.memory.close()
            lib.llama_free(handle)


def _on_huge_cache() -> Callable[[str], None]:
    """Ask for huge pages for the KV cache: returns what to call with each line of the log."""
    pages = HugePages()

    def on_line(line: str) -> None:
        if "KV buffer size" in line:  # it is allocated, and will be filled with zeros
            pages.advise()

    return on_line


def open_context(
    model: LlamaModel, config: Config, *, max_chunk: int = 0, n_scores: int = SCORE_ROWS
) -> Context:
    """Make a context that generates text. The arguments are those of `generation_params`.

    Raises:
        ModelLoadError: llama.cpp refuses the configuration, or there is not enough memory.
    """
    layout = choose(model, config)
    if layout.is_elastic:
        params = generation_params(model, config, layout, max_chunk=max_chunk, n_scores=n_scores)
        reason = ""
        # Memory that another thread frees meanwhile may come back as the cache's, and hide it.
        for _ in range(_LAZY_ATTEMPTS):
            try:
                return Context(model, params, layout)
            except NotLazyError as error:
                reason = error.message
            except ModelLoadError as error:
                reason = error.message
                break
        _log.info("the KV cache has a fixed size", reason=reason)
        layout = choose(model, config, may_be_elastic=False)
    params = generation_params(model, config, layout, max_chunk=max_chunk, n_scores=n_scores)
    return Context(model, params, layout)


def sampled_rows(model: LlamaModel, config: Config, n_seqs: int) -> int:
    """Return how many rows of a batch are sampled from: one of each sequence, and drafts."""
    return max(n_seqs, config.parallel + draft_rows(model, config))


def draft_rows(model: LlamaModel, config: Config) -> int:
    """Return how many rows of a batch the drafts of all slots may take."""
    return DRAFT_ROWS if config.draft_types else 0


def generation_params(
    model: LlamaModel,
    config: Config,
    layout: Layout | None = None,
    *,
    max_chunk: int = 0,
    is_whole: bool = True,
    n_scores: int = SCORE_ROWS,
) -> Any:
    """Make the parameters of a context that generates text.

    Args:
        model: the model.
        config: the configuration.
        layout: of the KV cache; by default the one that `choose` chooses.
        max_chunk: cells of media that must fit into a physical batch.
        is_whole: whether all layers get a KV cache, which is checked against the free memory.
        n_scores: rows for the scores of prompts; fewer in a small batch, but at least 1.

    Raises:
        ModelLoadError: the KV cache would be larger than the memory that is free.
    """
    layout = layout or choose(model, config)
    params = lib.llama_context_default_params()
    # llama.cpp aborts if a batch cannot hold one token of each sequence.
    params.n_ctx, params.n_seq_max = layout.n_cells, layout.n_seqs
    # By default, llama.cpp makes room for the logits of every row: 300 MB for 512 rows and 152,000
    # tokens.
    n_rows = sampled_rows(model, config, layout.n_seqs)
    n_batch = min(config.batch_size, layout.n_ctx)
    # In a small physical batch, logits would take most of the memory.
    n_left = max(1, min(n_batch - n_rows, config.ubatch_size // 2))
    params.n_outputs_max = n_rows + min(n_scores, n_left)
    if config.backend_sampling:
        params.n_outputs_max_per_seq = min(1 + draft_rows(model, config), params.n_outputs_max)
    params.n_rs_seq = snapshots(config, model.arch) if is_whole else 0
    # A physical batch with more rows than a sequence goes back by; otherwise, llama.cpp aborts.
    least = max(max_chunk, params.n_rs_seq + 2 if params.n_rs_seq else 0)
    params.n_batch = max(n_batch, params.n_outputs_max, least)
    params.n_ubatch = max(min(config.ubatch_size, params.n_batch), least)
    if lib.llama_model_n_swa(model.handle) > 0 and not config.swa_full:
        # llama.cpp tries out where each physical batch goes before it computes the first of them.
        # Without room for all, cells of the window are gone that were still needed.
        params.n_batch = params.n_ubatch = max(params.n_ubatch, params.n_outputs_max)
    decode_threads, prefill_threads = thread_choices(config)
    params.n_threads, params.n_threads_batch = decode_threads[-1], prefill_threads[-1]
    params.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
    params.type_k = CACHE_TYPES[config.cache_type_k].number
    params.type_v = CACHE_TYPES[config.cache_type_v].number
    params.kv_unified = layout.unified
    params.swa_full = config.swa_full
    params.offload_kqv = config.kv_offload
    params.op_offload = config.op_offload
    params.rope_scaling_type = _ROPE_SCALINGS[config.rope_scaling]
    for name in ROPE_FIELDS:
        setattr(params, name, getattr(config, name))
    params.no_perf = True
    if model.has_weights and is_whole:  # without weights, the cache does not exist either
        check_memory(model, config, layout, params)
    return params


def threads(number: int) -> int:
    """Resolve a number of threads: -1 is one for each physical core, 0 for each logical CPU.

    Only the cores that the process may run on count, up to its quota of CPU time: more threads
    would use up the quota sooner, and then all of them would stall.
    """
    if number > 0:
        return number
    count, quota = physical_cores() if number == -1 else len(allowed_cpus()), cpu_quota()
    return count if quota is None else min(count, max(1, int(quota)))


def thread_choices(config: Config) -> tuple[range, range]:
    """Return how many threads may decode, and how many may prefill, from the fewest to the most.

    A number that is configured is the only choice.
    """
    decode = threads(config.threads)
    if config.threads != -1:
        prefill = decode if config.threads_batch == -1 else threads(config.threads_batch)
        return range(decode, decode + 1), range(prefill, prefill + 1)
    if config.threads_batch != -1:
        prefill = threads(config.threads_batch)
        return range(1, decode + 1), range(prefill, prefill + 1)
    return range(1, decode + 1), range(1, decode + 1)
