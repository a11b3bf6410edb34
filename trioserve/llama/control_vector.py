"""Control vectors: what is added to the output of each layer, read from GGUF files.

A file has a tensor ``direction.N`` for each layer N that it changes, counted from 1. llama.cpp
applies them; that it reads GGUF files is a matter of ggml, whose functions the bindings lack.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioserve.errors import BackendMismatchError, ModelLoadError
from trioserve.llama.context import Context
from trioserve.llama.library import lib
from trioserve.llama.model import Model, check_file

_F32 = 0
_DIRECTION = re.compile(r"direction\.(\d{1,6})")


class _InitParams(ctypes.Structure):
    """`gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p)))


_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64

#: The functions of ggml that are called: what they take, and what they return.
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "gguf_init_from_file": ((ctypes.c_char_p, _InitParams), _POINTER),
    "gguf_get_n_tensors": ((_POINTER,), _INT64),
    "gguf_get_tensor_name": ((_POINTER, _INT64), ctypes.c_char_p),
    "gguf_get_tensor_type": ((_POINTER, _INT64), _INT),
    "gguf_free": ((_POINTER,), None),
    "ggml_get_tensor": ((_POINTER, ctypes.c_char_p), _POINTER),
    "ggml_n_dims": ((_POINTER,), _INT),
    "ggml_nelements": ((_POINTER,), _INT64),
    "ggml_get_data": ((_POINTER,), _POINTER),
    "ggml_free": ((_POINTER,), None),
}


def apply(
    model: Model,
    context: Context,
    files: Sequence[tuple[str, float]],
    layers: Sequence[int] = (),
) -> None:
    """Add up the vectors of some files, each times its scale, and make a context use them.

    `layers` are the first and the last layer that they change; none: all of them.

    Raises:
        ModelLoadError: a file is missing, or holds no control vector for this model.
    """
    if not files:
        return
    n_embd, n_layer = model.info.n_embd, model.info.n_layer
    total = np.zeros((n_layer, n_embd), dtype=np.float32)
    for path, scale in files:
        total += np.float32(scale) * read(Path(path), n_layer, n_embd)
    first, last = layers or (1, n_layer)
    pointer = total.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if lib.llama_set_adapter_cvec(context.handle, pointer, total.size, n_embd, first, last):
        raise ModelLoadError("llama.cpp refused the control vectors.")


def read(path: Path, n_layer: int, n_embd: int) -> NDArray[np.float32]:
    """Read the vectors of a file: a row for each layer, the first one for layer 1.

    Raises:
        ModelLoadError: it is missing, or holds no control vector for a model of this size.
    """
    check_file(path)
    rows = np.zeros((n_layer, n_embd), dtype=np.float32)
    with _opened(path) as tensors:
        found = list(tensors)
        if not found:
            raise ModelLoadError(f"The control vector {path} has no tensors.")
        for name, vector in found:
            match = _DIRECTION.fullmatch(name)
            if match is None or int(match[1]) == 0:
                raise ModelLoadError(
                    f"The control vector {path} has the tensor {name!r:.80}; it may only have "
                    "tensors direction.1, direction.2 and so on."
                )
            if vector is None or vector.shape != (n_embd,):
                raise ModelLoadError(
                    f"The control vector {path}: {name} must have {n_embd} values of type F32, "
                    "as many as the model's embeddings."
                )
            if (layer := int(match[1])) <= n_layer:  # llama.cpp has no use for others
                rows[layer - 1] += vector
    return rows


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[tuple[str, NDArray[np.float32] | None]]]:
    """Open a GGUF file; gives its tensors, each with a view of its values if it is a vector."""
    ggml = _library()
    data = ctypes.c_void_p()
    handle = ggml["gguf_init_from_file"](
        os.fsencode(path), _InitParams(False, ctypes.pointer(data))
    )
    if not handle:
        raise ModelLoadError(f"The control vector {path} cannot be read: it is damaged.")

    def tensors() -> Iterator[tuple[str, NDArray[np.float32] | None]]:
        for i in range(ggml["gguf_get_n_tensors"](handle)):
            name = ggml["gguf_get_tensor_name"](handle, i)
            tensor = ggml["ggml_get_tensor"](data, name)
            vector = None
            if ggml["gguf_get_tensor_type"](handle, i) == _F32 and ggml["ggml_n_dims"](tensor) == 1:
                size = ggml["ggml_nelements"](tensor)
                values = (ctypes.c_float * size).from_address(ggml["ggml_get_data"](tensor))
                vector = np.frombuffer(values, dtype=np.float32)
            yield name.decode(errors="replace"), vector

    try:
        yield tensors()
    finally:
        ggml["gguf_free"](handle)
        ggml["ggml_free"](data)


def _library() -> dict[str, Any]:
    """Bind the functions of ggml, which libllama is linked with.

    Raises:
        BackendMismatchError: one of them is not there.
    """
    bound = {}
    shared = ctypes.CDLL(lib._lib._name, handle=lib._lib._handle)
    for name, (takes, returns) in _FUNCTIONS.items():
        try:
            function = getattr(shared, name)
        except AttributeError as error:
            raise BackendMismatchError(
                f"The installed llama.cpp lacks {name}, which control vectors need."
            ) from error
        function.argtypes, function.restype = takes, returns
        bound[name] = function
    return bound
