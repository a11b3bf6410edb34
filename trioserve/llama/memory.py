"""Memory: what the sequences of a context hold, and how it is cut, copied, moved and saved.

In a KV cache for all sequences (unified), a copy marks the same cells as belonging to both. In one
with a part for each (split), llama.cpp copies the whole part, at the next decode.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from trioserve.errors import EngineError, InvalidRequestError, NotSupportedError
from trioserve.llama import library
from trioserve.llama.library import lib, short

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

    def __init__(self, context: Any, n_seqs: int, *, unified: bool) -> None:
        self._context: Any = context
        self._handle: Any = lib.llama_get_memory(context)
        self._n_seqs = n_seqs
        self._unified = unified
        self._sources: set[int] = set()  # of copies that the next decode makes
        self._targets: set[int] = set()

    def close(self) -> None:
        """Forget the pointers; the context frees what they point to."""
        self._context = self._handle = None

    def settle(self) -> None:
        """Note that a decode has run, which completes pending copies."""
        self._sources.clear()
        self._targets.clear()

    def remove(self, seq: int, start: int, stop: int = -1) -> bool:
        """Remove positions ``start <= p < stop`` of a sequence; ``stop=-1`` is to the end.

        Returns whether it could. Removing a whole sequence never fails.
        """
        self._check(seq)
        return bool(lib.llama_memory_seq_rm(self._handle, seq, max(0, start), stop))

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
        if source != target:
            # Both bounds must be open: a copy between two parts must be of the whole sequence.
            lib.llama_memory_seq_cp(self._handle, source, target, -1, -1)
            if not self._unified:
                self._sources.add(source)
                self._targets.add(target)

    def move(self, seq: int, start: int, stop: int, delta: int) -> None:
        """Add `delta` to the positions ``start <= p < stop`` of a sequence.

        Raises:
            NotSupportedError: the model's positions cannot be moved.
            EngineError: a position would be negative.
        """
        self._check(seq)
        if not lib.llama_memory_can_shift(self._handle):
            raise NotSupportedError("This model's KV cache cannot be shifted.")
        if start < 0 or start + delta < 0:
            raise EngineError(f"Positions from {start} cannot be moved by {delta}.")
        lib.llama_memory_seq_add(self._handle, seq, start, stop, delta)

    def first(self, seq: int) -> int:
        """The first position that a sequence holds, -1 when it is empty."""
        self._check(seq)
        return int(short.llama_memory_seq_pos_min(self._handle, seq))

    def last(self, seq: int) -> int:
        """The last position that a sequence holds, -1 when it is empty."""
        self._check(seq)
        return int(short.llama_memory_seq_pos_max(self._handle, seq))

    def saved_size(self, seq: int, *, partial: bool = False) -> int:
        """How many bytes `save` would return."""
        self._check(seq)
        return int(lib.llama_state_seq_get_size_ext(self._context, seq, int(partial)))

    def save(self, seq: int, *, partial: bool = False) -> bytes:
        """Return what a sequence holds, for `restore`; `partial`: only what cannot be cut of it.

        That is the sliding window or the recurrent state, and of plain attention nothing.

        Raises:
            EngineError: a copy to it is pending until the next decode, or llama.cpp fails.
        """
        self._check(seq)
        if seq in self._targets:
            raise EngineError("A copied sequence is complete only after the next decode.")
        size = self.saved_size(seq, partial=partial)
        data: bytes = _new_bytes(None, size)  # may be written to while nobody else has it
        target = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        written = lib.llama_state_seq_get_data_ext(self._context, target, size, seq, int(partial))
        if not 0 < written <= size:
            why = library.reason(library.take_errors())
            raise EngineError(f"Sequence {seq} cannot be saved: {why}.")
        return data if written == size else data[:written]

    def restore(self, seq: int, data: bytes, *, partial: bool = False) -> None:
        """Replace what a sequence holds by what `save` returned, or a part of it by such a part.

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
            self.remove(seq, 0)
            raise InvalidRequestError(f"The saved state does not fit this model's context: {why}.")

    def rewind(self, seq: int, length: int, data: bytes) -> None:
        """Put a sequence back to its first `length` positions.

        `data` is what `save` returned in part when it ended there.

        Raises:
            InvalidRequestError: it does not fit; the sequence is then empty.
            EngineError: a copy from it or to it is pending until the next decode.
        """
        self.restore(seq, data, partial=True)
        # Cut after that, for llama.cpp refuses to cut a state that is further on. And look before:
        # a window that is further on would be cut, and then lack what is behind it.
        if self.last(seq) != length - 1 or not self.remove(seq, length):
            self.remove(seq, 0)
            raise InvalidRequestError(f"The saved state is not one after {length} positions.")

    def _check(self, seq: int) -> None:
        if not 0 <= seq < self._n_seqs:
            raise EngineError(f"There is no sequence {seq}; there are {self._n_seqs}.")
        if self._handle is None:
            raise EngineError("The context is closed.")
