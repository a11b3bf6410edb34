"""The installed llama.cpp: its functions, a check that all of them exist, and its log.

`lib` is the module of ctypes bindings. ctypes releases the GIL around each call. That is right for
`llama_decode`, but costs more than the call itself where one takes a microsecond: `short` has such
functions, which keep the GIL.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import structlog

from trioserve.errors import BackendMismatchError, ServerClosingError
from trioserve.log import get_logger

if TYPE_CHECKING:
    import llama_cpp  # noqa: F401 (by `bindings`)

#: The oldest version of llama-cpp-python that is known to work.
MIN_VERSION = "0.3.36"

#: Every C function that this package calls. A test compares it with the sources.
# fmt: off
FUNCTIONS = (
    "llama_adapter_get_alora_n_invocation_tokens", "llama_adapter_lora_free",
    "llama_adapter_lora_init",
    "llama_adapter_meta_val_str", "llama_backend_init", "llama_chat_apply_template",
    "llama_context_default_params",
    "llama_decode", "llama_encode", "llama_free", "llama_ftype_name", "llama_get_causal_attn",
    "llama_get_embeddings", "llama_get_embeddings_ith", "llama_get_embeddings_seq",
    "llama_get_logits_ith", "llama_get_memory",
    "llama_init_from_model", "llama_log_set", "llama_max_devices", "llama_max_parallel_sequences",
    "llama_memory_seq_cp", "llama_memory_seq_pos_max", "llama_memory_seq_pos_min",
    "llama_memory_seq_rm",
    "llama_model_chat_template", "llama_model_cls_label", "llama_model_default_params",
    "llama_model_desc",
    "llama_model_free", "llama_model_ftype", "llama_model_get_vocab", "llama_model_has_decoder",
    "llama_model_has_encoder", "llama_model_is_diffusion", "llama_model_is_hybrid",
    "llama_model_is_recurrent", "llama_model_load_from_file", "llama_model_meta_count",
    "llama_model_meta_key_by_index", "llama_model_meta_val_str_by_index", "llama_model_n_cls_out",
    "llama_model_n_ctx_train", "llama_model_n_embd", "llama_model_n_embd_inp",
    "llama_model_n_embd_out", "llama_model_n_layer", "llama_model_n_params", "llama_model_n_swa",
    "llama_model_rope_type", "llama_model_size", "llama_n_batch", "llama_n_ctx", "llama_n_ctx_seq",
    "llama_n_rs_seq",
    "llama_n_seq_max",
    "llama_n_ubatch", "llama_numa_init", "llama_pooling_type", "llama_print_system_info",
    "llama_sampler_accept", "llama_sampler_apply", "llama_sampler_chain_add",
    "llama_sampler_chain_default_params", "llama_sampler_chain_get", "llama_sampler_chain_init",
    "llama_sampler_chain_n", "llama_sampler_chain_remove", "llama_sampler_clone",
    "llama_sampler_free",
    "llama_sampler_init_adaptive_p",
    "llama_sampler_init_dist", "llama_sampler_init_dry", "llama_sampler_init_infill",
    "llama_sampler_init_logit_bias", "llama_sampler_init_min_p", "llama_sampler_init_mirostat",
    "llama_sampler_init_mirostat_v2", "llama_sampler_init_penalties", "llama_sampler_init_temp",
    "llama_sampler_init_temp_ext", "llama_sampler_init_top_k", "llama_sampler_init_top_n_sigma",
    "llama_sampler_init_top_p", "llama_sampler_init_typical", "llama_sampler_init_xtc",
    "llama_sampler_name", "llama_sampler_sample", "llama_set_adapter_cvec",
    "llama_set_adapters_lora", "llama_set_causal_attn", "llama_set_n_threads", "llama_set_sampler",
    "llama_state_seq_get_data_ext", "llama_state_seq_get_size_ext",
    "llama_state_seq_set_data_ext",
    "llama_supports_gpu_offload", "llama_synchronize", "llama_token_to_piece", "llama_tokenize",
    "llama_version",
    "llama_vocab_bos", "llama_vocab_eos", "llama_vocab_eot", "llama_vocab_fim_mid",
    "llama_vocab_fim_pre", "llama_vocab_fim_rep", "llama_vocab_fim_sep", "llama_vocab_fim_suf",
    "llama_vocab_get_add_bos", "llama_vocab_get_add_eos", "llama_vocab_get_add_sep",
    "llama_vocab_get_attr", "llama_vocab_get_suppress_tokens", "llama_vocab_get_text",
    "llama_vocab_is_eog", "llama_vocab_mask", "llama_vocab_n_tokens", "llama_vocab_sep",
    "llama_vocab_type",
)
# fmt: on

#: Functions that return within microseconds, take no lock, and never wait.
SHORT = (
    "llama_get_logits_ith",
    "llama_memory_seq_pos_max",
    "llama_memory_seq_pos_min",
    "llama_sampler_accept",
    "llama_sampler_sample",  # for tokens sampled in the decode
    "llama_token_to_piece",
    "llama_vocab_get_attr",
    "llama_vocab_is_eog",
)


def bindings(name: str) -> Any:
    """Import a module of llama_cpp, but not what the package itself imports: a server's worth.

    A program that has imported the package, or does so later, gets it with the same bindings.
    """
    if "llama_cpp" in sys.modules:
        return import_module(f"llama_cpp.{name}")
    if (spec := find_spec("llama_cpp")) is None:
        raise ImportError("llama-cpp-python is not installed")
    sys.modules["llama_cpp"] = module_from_spec(spec)
    try:
        return import_module(f"llama_cpp.{name}")
    finally:
        del sys.modules["llama_cpp"]


_import_error: Exception | None = None
try:
    _bindings = bindings("llama_cpp")
except (ImportError, OSError, RuntimeError, AttributeError) as error:
    # AttributeError: the shared library lacks a function that the bindings name.
    _bindings, _import_error = None, error
lib: Any = _bindings


def check_library() -> None:
    """Check that the installed llama.cpp has the functions and structures that we use.

    Raises:
        BackendMismatchError: something is missing; the message names it.
    """
    needs = f"trioserve needs llama-cpp-python {MIN_VERSION} or a later one that is compatible"
    if lib is None:
        raise BackendMismatchError(f"llama.cpp cannot be used ({_import_error}); {needs}.")
    missing = [name for name in FUNCTIONS if not hasattr(lib, name)]
    if missing:
        raise BackendMismatchError(f"The installed llama.cpp lacks {', '.join(missing)}; {needs}.")
    # If the last fields of the largest structure are right, the bindings and the library agree.
    params = lib.llama_context_default_params()
    if (params.type_k, params.type_v, params.n_samplers) != (1, 1, 0):
        raise BackendMismatchError(
            f"llama.cpp's structures are not those of its Python bindings; {needs}."
        )


def _keep_gil() -> SimpleNamespace:
    """Bind the functions of `SHORT` so that they keep the GIL when called."""
    if lib is None:
        return SimpleNamespace()
    shared = lib._lib
    library = ctypes.PyDLL(shared._name, handle=shared._handle)
    bound = SimpleNamespace()
    for name in SHORT:
        if (known := getattr(lib, name, None)) is not None:
            function = getattr(library, name)
            function.argtypes, function.restype = known.argtypes, known.restype
            setattr(bound, name, function)
    return bound


short: Any = _keep_gil()

# -- llama.cpp's log

_LEVELS = {0: "debug", 1: "debug", 2: "debug", 3: "warning", 4: "error"}
_CONTINUED = 5
_log: Any = get_logger("llama")


#: A warning that comes with every model that hears, also with one that does so well.
_NO_NEWS = "audio input is in experimental stage"


class _Lines(threading.local):
    """The unfinished line of a thread, and the errors that it logged last."""

    def __init__(self) -> None:
        self.level = 0
        self.parts: list[str] = []
        self.errors: deque[str] = deque(maxlen=16)
        self.are_expected: Callable[[], bool] = bool  # by default they never are
        self.listeners: list[Callable[[str], object]] = []

    def add(self, level: int, text: str) -> None:
        if level != _CONTINUED:
            self.flush()
            self.level = level
        self.parts.append(text)
        if text.endswith("\n"):
            self.flush()

    def flush(self) -> None:
        line = "".join(self.parts).strip()
        self.parts.clear()
        if line.strip("."):  # a line of dots is a progress bar; `progress` reports that
            if self.level == 4:
                self.errors.append(line)
            for listener in self.listeners:
                listener(line)
            self.write(_LEVELS.get(self.level, "debug"), line)

    def write(self, level: str, line: str) -> None:
        if level != "debug" and (self.are_expected() or _NO_NEWS in line):
            level = "debug"
        # A program that has not configured structlog should not get 300 lines on standard output.
        if level != "debug" or structlog.is_configured():
            getattr(_log, level)(line)


#: Errors in a thread are expected while its `are_expected` returns true.
lines = _Lines()


def _on_log(level: int, text: bytes | None, _data: object) -> None:
    lines.add(level, (text or b"").decode(errors="replace"))


# ctypes does not keep a callback alive, so the module does.
_callback: Any = None
_NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}
_starting = threading.Lock()


def start(numa: str = "none") -> None:
    """Check the library, take its log lines, and initialize it once, for this kind of NUMA.

    A process has one log function of llama.cpp. It is set again for each model, because other users
    of llama_cpp may have changed it.

    Raises:
        BackendMismatchError: as `check_library`.
    """
    global _callback
    check_library()
    with _starting:
        first = _callback is None
        if first:
            _callback = lib.llama_log_callback(_on_log)
        lib.llama_log_set(_callback, None)
        if first:
            _load_backends()
            lib.llama_backend_init()
        if numa != "none":
            lib.llama_numa_init(_NUMA[numa])  # does nothing the second time


def ggml() -> Any:
    """Return the library ggml that llama.cpp uses, after `check_library`.

    A wheel has ggml under several names, and loading it by another one can give a second copy, with
    a separate list of backends. Windows finds a function only in the library that defines it.
    """
    shared = lib._lib
    if hasattr(shared, "ggml_backend_dev_count"):
        return shared
    return bindings("_ggml").libggml


def _load_backends() -> None:
    """Have ggml load its backends, if each is in a library file (``GGML_BACKEND_DL``).

    They are in llama.cpp's folder. Of those for the CPU, ggml takes the best one that this
    processor can run.
    """
    found = ggml()
    if found.ggml_backend_dev_count() == 0:
        found.ggml_backend_load_all_from_path(os.fsencode(os.path.dirname(lib._lib._name)))


def log_callback() -> Any:
    """Return the function that takes log lines, for other libraries; after `start`."""
    return _callback


@contextmanager
def listening(listener: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each line that llama.cpp logs in this thread, of every level.

    That is at the moment when llama.cpp logs it. The function must not raise.
    """
    lines.flush()
    lines.listeners.append(listener)
    try:
        yield
    finally:
        lines.flush()
        lines.listeners.remove(listener)


def take_errors() -> list[str]:
    """Return the error lines that llama.cpp has logged in this thread, and clear them."""
    lines.flush()
    errors = list(lines.errors)
    lines.errors.clear()
    return errors


def reason(errors: list[str]) -> str:
    """Make a part of a sentence of error lines: the first one, which is the cause of the rest."""
    if not errors:
        return "llama.cpp does not say why"
    return re.sub(r"^\w+: (error loading model: )?", "", errors[0]).rstrip(". ")


class HandleOwner:
    """Owns a C object, `handle`. `close`, or the end of a ``with`` block, frees it."""

    handle: Any = None

    def close(self) -> None:
        """Free it. Closing twice is fine."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self.handle is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)


class SharedHandle:
    """Keeps a pointer valid while a thread uses it.

    Closing waits for running calls; a later one raises `ServerClosingError`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle: Any = handle
        self._users = 0
        self._idle = threading.Condition()

    @property
    def is_closed(self) -> bool:
        """True if it is closed, or will be when the last user returns it."""
        return self._handle is None

    @contextmanager
    def in_use(self) -> Iterator[Any]:
        """Lend the pointer, which is not freed meanwhile."""
        with self._idle:
            if (handle := self._handle) is None:
                raise ServerClosingError("The model is closed")
            self._users += 1
        try:
            yield handle
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def close(self) -> Any:
        """Wait for running calls, and refuse later ones.

        Returns the pointer, which is the caller's to free; None the second time.
        """
        with self._idle:
            handle, self._handle = self._handle, None
            self._idle.wait_for(lambda: self._users == 0)
        return handle
