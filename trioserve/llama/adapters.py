"""What is added to a model: LoRA adapters to its weights, control vectors to its layers' output."""

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

from trioserve.errors import BackendMismatchError, DecodeError, EngineError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.context import Context
from trioserve.llama.header import check_file
from trioserve.llama.library import lib
from trioserve.llama.model import LlamaModel
from trioserve.types import AdapterInfo, Adapters

#: The type of a pointer to an adapter, as the bindings have it.
_HANDLE = ctypes.POINTER(ctypes.c_void_p)


class LoadedAdapters:
    """The adapters of a model. The model frees them when it is closed.

    Raises:
        ModelLoadError: a file is missing, is not a LoRA adapter, or is one for another model.
    """

    def __init__(self, model: LlamaModel, files: Sequence[tuple[str, float]]) -> None:
        self._handles = [_load(model, Path(path)) for path, _ in files]
        self.infos = tuple(
            AdapterInfo(
                path=path,
                scale=scale,
                task_name=_entry(handle, b"adapter.lora.task_name"),
                prompt_prefix=_entry(handle, b"adapter.lora.prompt_prefix"),
            )
            for handle, (path, scale) in zip(self._handles, files, strict=True)
        )

    def use(self, context: Context, adapters: Adapters) -> None:
        """Make a context compute with these and no others.

        llama.cpp then plans its buffers again, which takes about as long as a token.
        """
        n = len(adapters)
        if any(not 0 <= id_ < len(self._handles) for id_, _ in adapters):
            raise EngineError(f"Adapter ids are below {len(self._handles)}; got {adapters}.")
        handles = (_HANDLE * n)(*(self._handles[i] for i, _ in adapters))
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        if lib.llama_set_adapters_lora(context.handle, handles, n, scales):
            raise DecodeError("llama.cpp refused the LoRA adapters.")


def _load(model: LlamaModel, path: Path) -> Any:
    check_file(path)
    library.take_errors()
    handle = lib.llama_adapter_lora_init(model.handle, os.fsencode(path))
    if not handle:
        why = library.reason(library.take_errors())
        raise ModelLoadError(f"The LoRA adapter {path} cannot be used: {why}.")
    if lib.llama_adapter_get_alora_n_invocation_tokens(handle):
        raise ModelLoadError(
            f"The adapter {path} is an activated LoRA, which applies only after certain tokens of "
            "the prompt; such adapters are not supported."
        )
    return handle


def _entry(handle: Any, key: bytes) -> str:
    """Read an entry of the metadata; empty if there is none."""
    buffer = ctypes.create_string_buffer(1024)
    lib.llama_adapter_meta_val_str(handle, key, buffer, len(buffer))
    return buffer.value.decode(errors="replace")


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


def apply_control_vectors(
    model: LlamaModel,
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
        total += np.float32(scale) * read_control_vector(Path(path), n_layer, n_embd)
    first, last = layers or (1, n_layer)
    pointer = total.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if lib.llama_set_adapter_cvec(context.handle, pointer, total.size, n_embd, first, last):
        raise ModelLoadError("llama.cpp refused the control vectors.")


def read_control_vector(path: Path, n_layer: int, n_embd: int) -> NDArray[np.float32]:
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
