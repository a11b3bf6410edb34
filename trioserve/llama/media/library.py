"""libmtmd: its functions, and two that it lacks: ending an encoding, and changing its threads."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from time import perf_counter
from typing import Any

from trioserve.errors import BackendMismatchError
from trioserve.llama import library
from trioserve.llama.library import lib

#: Every function of libmtmd that this package calls. A test compares it with the sources.
FUNCTIONS = (
    "mtmd_bitmap_free", "mtmd_bitmap_init", "mtmd_bitmap_init_from_audio",
    "mtmd_bitmap_set_mergeable", "mtmd_context_params_default", "mtmd_decode_use_mrope",
    "mtmd_decode_use_non_causal", "mtmd_encode_chunk", "mtmd_free", "mtmd_gen_audio_get_info",
    "mtmd_gen_audio_process", "mtmd_gen_inp_default", "mtmd_get_audio_sample_rate",
    "mtmd_get_output_embd", "mtmd_helper_image_get_decoder_pos", "mtmd_helper_log_set",
    "mtmd_init_from_file", "mtmd_input_chunk_get_n_pos", "mtmd_input_chunk_get_n_tokens",
    "mtmd_input_chunk_get_tokens_image", "mtmd_input_chunk_get_tokens_text",
    "mtmd_input_chunk_get_type", "mtmd_input_chunks_free", "mtmd_input_chunks_get",
    "mtmd_input_chunks_init", "mtmd_input_chunks_size", "mtmd_support_audio",
    "mtmd_support_vision", "mtmd_tokenize_from_parts",
)  # fmt: skip


@cache
def load() -> Any:
    """Return libmtmd's bindings, and take its log lines.

    Raises:
        BackendMismatchError: it is not there, or lacks a function.
    """
    try:
        mtmd = library.bindings("mtmd_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendMismatchError(f"libmtmd cannot be used: {error}.") from error
    missing = [name for name in FUNCTIONS if not hasattr(mtmd, name)]
    if missing:
        raise BackendMismatchError(f"The installed libmtmd lacks {', '.join(missing)}.")
    params = mtmd.mtmd_context_params_default()
    if (params.image_min_tokens, params.image_max_tokens) != (-1, -1):
        raise BackendMismatchError("libmtmd's structures are not those of its Python bindings.")
    mtmd.mtmd_helper_log_set(library.log_callback(), None)
    return mtmd


#: Seconds of computing after which the callback wants to be asked: an interrupt takes as long.
_PACE = 0.003
_MAX_STRIDE = 256

#: A number of threads that no machine has, to find where a context keeps it.
_MARK = 0x2B7E1516
#: Bytes at the start of a context to look for it in.
_REACH = 256


class EncodingInterrupt:
    """Interrupts the running encoding.

    libmtmd asks a callback before each node of its graph whether it wants the result; if so, it
    computes the nodes so far, and asks again whether to continue. Each result costs a wait for all
    threads, so the callback wants one about every 3 ms of computing.
    """

    def __init__(self) -> None:
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)
        self._lock = threading.Lock()
        self._is_running = False
        self._is_set = False
        self._stride = 1
        self._n_asked = 0
        self._since = 0.0

    def start(self) -> None:
        """Note that an encoding begins."""
        with self._lock:
            self._is_running, self._is_set = True, False
        self._n_asked, self._since = 0, perf_counter()

    def end(self) -> bool:
        """Note that it has ended; returns whether it was ended early."""
        with self._lock:
            was_set, self._is_running, self._is_set = self._is_set, False, False
            return was_set

    def set(self) -> None:
        """End the encoding that runs; without one, do nothing. From any thread."""
        with self._lock:
            self._is_set = self._is_running

    def _on_node(self, _tensor: Any, is_asking: bool, _data: Any) -> bool:
        if is_asking:
            self._n_asked += 1
            return self._is_set or self._n_asked >= self._stride
        now = perf_counter()
        if now - self._since > _PACE:
            self._stride = max(1, self._stride // 2)
        elif now - self._since < _PACE / 2:
            self._stride = min(_MAX_STRIDE, self._stride * 2)
        self._n_asked, self._since = 0, now
        return not self._is_set


class EncodingThreads:
    """The number of threads of a context, which libmtmd reads at the start of each encoding.

    It has no function that changes it, so this looks for its place: a context is made with a number
    that stands nowhere else.
    """

    MARK = _MARK

    def __init__(self, context: int) -> None:
        numbers = (ctypes.c_int32 * (_REACH // 4)).from_address(context)
        places = [place for place, number in enumerate(numbers) if number == _MARK]
        self._place = 4 * places[0] if len(places) == 1 else None
        self._context = context

    @property
    def is_found(self) -> bool:
        """True if the place was found."""
        return self._place is not None

    def set(self, count: int) -> None:
        """Encode with `count` threads from the next chunk on."""
        if self._place is not None:
            ctypes.c_int32.from_address(self._context + self._place).value = count
