"""Additions to a model: LoRA adapters to its weights, control vectors to its layers' output."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioserve.errors import DecodeError, EngineError, ModelLoadError
from trioserve.llama import last_word, library
from trioserve.llama.context import Context
from trioserve.llama.library import lib
from trioserve.llama.model import LlamaModel
from trioserve.models import gguf
from trioserve.types import AdapterInfo, Adapters

#: The type of a pointer to an adapter, as the bindings have it.
_HANDLE = ctypes.POINTER(ctypes.c_void_p)


class LoadedAdapters:
    """The adapters of a model. The model frees them when it is closed.

    Raises:
        ModelLoadError: a file is missing, is not a LoRA adapter, or is one for another model.
    """

    def __init__(self, model: LlamaModel, files: Sequence[tuple[str, float]]) -> None:
        self._model = model
        self._handles: list[Any] = []
        #: The adapters, by id. One that was removed has no path.
        self.infos: tuple[AdapterInfo, ...] = ()
        for path, scale in files:
            self.add(path, scale)

    def add(self, path: str, scale: float) -> int:
        """Load one more, between two decodes; returns its id. Raises ModelLoadError."""
        handle = _load(self._model, Path(path))
        self._handles.append(handle)
        info = AdapterInfo(
            path=path,
            scale=scale,
            task_name=_entry(handle, b"adapter.lora.task_name"),
            prompt_prefix=_entry(handle, b"adapter.lora.prompt_prefix"),
        )
        self.infos = (*self.infos, info)
        return len(self.infos) - 1

    def remove(self, id_: int) -> None:
        """Free one that no context uses. Its id is not used again."""
        handle, self._handles[id_] = self._handles[id_], None
        self.infos = (*self.infos[:id_], AdapterInfo(path=""), *self.infos[id_ + 1 :])
        lib.llama_adapter_lora_free(handle)

    def use(self, context: Context, adapters: Adapters) -> None:
        """Make a context compute with these and no others.

        llama.cpp then plans its buffers again, which takes about as long as a token.
        """
        n, n_known = len(adapters), len(self._handles)
        if any(not 0 <= id_ < n_known or self._handles[id_] is None for id_, _ in adapters):
            raise EngineError(f"There are {n_known} adapters, or less; got {adapters}.")
        handles = (_HANDLE * n)(*(self._handles[i] for i, _ in adapters))
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        if lib.llama_set_adapters_lora(context.handle, handles, n, scales):
            raise DecodeError("llama.cpp refused the LoRA adapters.")


def _load(model: LlamaModel, path: Path) -> Any:
    last_word.names(f"the LoRA adapter {path}")
    gguf.check_file(path)
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
    """Read an entry of the metadata; empty if it is missing."""
    buffer = ctypes.create_string_buffer(1024)
    lib.llama_adapter_meta_val_str(handle, key, buffer, len(buffer))
    return buffer.value.decode(errors="replace")


_F32 = 0
_DIRECTION = re.compile(r"direction\.(\d{1,6})")


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
    gguf.check_file(path)
    rows = np.zeros((n_layer, n_embd), dtype=np.float32)
    try:
        with gguf.read(path) as header:
            found, start = list(header.tensors()), header.data_start()
    except ModelLoadError as error:
        raise _damaged(path) from error
    if not found:
        raise ModelLoadError(f"The control vector {path} has no tensors.")
    for one in found:
        name = one.name.decode(errors="replace")
        match = _DIRECTION.fullmatch(name)
        if match is None or int(match[1]) == 0:
            raise ModelLoadError(
                f"The control vector {path} has the tensor {name!r:.80}; it may only have "
                "tensors direction.1, direction.2 and so on."
            )
        if one.kind != _F32 or one.shape != (n_embd,):
            raise ModelLoadError(
                f"The control vector {path}: {name} must have {n_embd} values of type F32, "
                "the size of the model's embeddings."
            )
        values = np.fromfile(path, dtype="<f4", count=n_embd, offset=start + one.offset)
        if len(values) < n_embd:
            raise _damaged(path)
        if (layer := int(match[1])) <= n_layer:  # llama.cpp has no use for others
            rows[layer - 1] += values
    return rows


def _damaged(path: Path) -> ModelLoadError:
    return ModelLoadError(f"The control vector {path} cannot be read: it is damaged.")
