"""Functions of llama.cpp's staging interface (`src/llama-ext.h`), which drafts by heads need.

They may be missing or change, so the server starts without them unless such drafts are configured.
They are C++ functions; some builds export them under a mangled name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from trioserve.errors import BackendMismatchError
from trioserve.llama.library import lib

_CONTEXT, _MODEL = "P13llama_context", "PK11llama_model"
_POINTER = ctypes.c_void_p

#: Of each function: the mangled parameters, the types of its arguments, and that of its result.
_FUNCTIONS: dict[str, tuple[str, list[Any], Any]] = {
    "llama_set_embeddings_nextn": (
        f"{_CONTEXT}bb",
        [_POINTER, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_nextn": (_CONTEXT, [_POINTER], _POINTER),
    "llama_set_nextn_layer_offset": (f"{_CONTEXT}i", [_POINTER, ctypes.c_int32], None),
    "llama_set_embeddings_layer_inp": (
        f"{_CONTEXT}jb",
        [_POINTER, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_layer_inp": (f"{_CONTEXT}j", [_POINTER, ctypes.c_uint32], _POINTER),
    "llama_model_target_layer_ids": (_MODEL, [_POINTER], ctypes.POINTER(ctypes.c_int32)),
    "llama_model_target_layer_ids_n": (_MODEL, [_POINTER], ctypes.c_uint32),
    "llama_model_dflash_selector_top_k": (_MODEL, [_POINTER], ctypes.c_int32),
    "llama_model_n_layer_nextn": ("", [_POINTER], ctypes.c_int32),
}


def _bound(name: str) -> Callable[..., Any] | None:
    parameters, argtypes, restype = _FUNCTIONS[name]
    library = lib._lib
    for symbol in (name, f"_Z{len(name)}{name}{parameters}"):
        if hasattr(library, symbol):
            # All of them are short, so they keep the GIL.
            return ctypes.PYFUNCTYPE(restype, *argtypes)((symbol, library))
    return None


def staged(spec_type: str) -> Any:
    """Return the functions for drafts, as attributes; `spec_type` is for the message.

    Raises:
        BackendMismatchError: the library lacks one; the message names it.
    """
    bound = {name: _bound(name) for name in _FUNCTIONS}
    found = {name: function for name, function in bound.items() if function is not None}
    missing = [name for name in _FUNCTIONS if name not in found]
    if not hasattr(lib.llama_context_default_params(), "ctx_other"):
        missing.append("ctx_other")
    if missing:
        raise BackendMismatchError(
            f"spec_type {spec_type!r} needs a llama.cpp with {missing[0]}, which the installed one "
            "lacks."
        )
    return SimpleNamespace(**found)
