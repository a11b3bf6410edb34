"""Adapters: the LoRA files that are loaded beside a model, and which of them a context uses."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trioserve.errors import DecodeError, EngineError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.context import Context
from trioserve.llama.library import lib
from trioserve.llama.model import Model, check_file
from trioserve.types import AdapterInfo, Adapters

#: The type of a pointer to an adapter, as the bindings have it.
_HANDLE = ctypes.POINTER(ctypes.c_void_p)


class LoadedAdapters:
    """The adapters of a model. The model frees them when it is closed.

    Raises:
        ModelLoadError: a file is missing, is not a LoRA adapter, or is one for another model.
    """

    def __init__(self, model: Model, files: Sequence[tuple[str, float]]) -> None:
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


def _load(model: Model, path: Path) -> Any:
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
