"""Model: the weights and the metadata of a GGUF file, and llama.cpp's own chat templates."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trioserve.config import Config
from trioserve.config.readers import unicode_name
from trioserve.errors import ModelLoadError, ServerClosingError
from trioserve.llama import devices, last_word, library
from trioserve.llama.library import HandleOwner, lib
from trioserve.llama.machine import (
    HugePages,
    free_memory,
    has_huge_pages,
    is_in_use,
    mark_in_use,
)
from trioserve.llama.shape import Shape, read_shape
from trioserve.llama.vocab import LlamaVocab
from trioserve.models import gguf, resolve
from trioserve.models.head_families import FILE_TYPES
from trioserve.types import ModelInfo
from trioserve.units import bytes_text

Progress = Callable[[float], bool]

_LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
_MAPPED = ("auto", "mmap", "mmap+mlock")
#: Architectures with such keys, and a state in place of the newest.
_COMPRESSED = frozenset({"deepseek4"})
_CUT_SHORT = ("not within the file bounds", "exceeds remaining file size", "failed to read")


class LlamaModel(HandleOwner):
    """A loaded model. Contexts use it, so it is closed after them.

    `handle` is llama.cpp's pointer. Close it in any thread, after its last use.
    """

    def __init__(
        self,
        handle: Any,
        path: Path,
        config: Config,
        *,
        has_weights: bool = True,
        is_head: bool = False,
    ) -> None:
        self.handle: Any = handle
        self.has_weights = has_weights
        self._in_use = mark_in_use(path) if has_weights else None
        self._swa_full = config.swa_full
        self._overridden = devices.overridden(config)
        self._lending = threading.Lock()
        self._n_lent, self._is_closing = 0, False
        try:
            self.metadata = _metadata(handle) | devices.overridden(config)
            if not is_head:
                self._check_kind(path)
            self.vocab = LlamaVocab(lib.llama_model_get_vocab(handle), self.metadata)
            self.info = self._describe(path, config)
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        config: Config,
        *,
        progress: Progress | None = None,
        weights: bool = True,
        is_head: bool = False,
    ) -> LlamaModel:
        """Load the file that `config.model` names, or the bundled one.

        Without `weights`, nothing can be computed with it, nor with a context of it: both say how
        much memory they would take, but take next to none. `is_head` allows one that only makes
        drafts.

        Raises:
            ModelLoadError: it is missing, not a GGUF, cut short, too large, damaged, of a kind that
                is not supported, or `progress` cancelled.
        """
        library.start(config.numa)
        path = resolve(config.model)
        last_word.names(f"the model file {path}")
        gguf.check_file(path)
        if weights:
            _check_size(path, config)
        handle = _load_weights(path, config, progress, weights)
        return cls(handle, path, config, has_weights=weights, is_head=is_head)

    def lend(self) -> Callable[[], None]:
        """Keep the weights for another context, until what this returns is called, once.

        Raises:
            ServerClosingError: the model is closed.
        """
        with self._lending:
            if self._is_closing:
                raise ServerClosingError
            self._n_lent += 1

        def give_back() -> None:
            with self._lending:
                self._n_lent -= 1
                is_last = self._is_closing and not self._n_lent
            if is_last:
                self._free()

        return give_back

    def close(self) -> None:
        """Free the weights, as soon as they are lent no more. Closing twice is fine."""
        with self._lending:
            self._is_closing, is_lent = True, self._n_lent > 0
        if not is_lent:
            self._free()

    def _free(self) -> None:
        if hasattr(self, "vocab"):
            self.vocab.close()
        handle, self.handle = self.handle, None
        if handle is not None:
            lib.llama_model_free(handle)
        if self._in_use is not None:
            self._in_use.close()

    @cached_property
    def shape(self) -> Shape | None:
        """The sizes that the header of the file tells; None if it cannot be read."""
        return read_shape(Path(self.info.path), self._overridden)

    @property
    def arch(self) -> str:
        """The architecture, such as ``llama``: the prefix of its keys in the metadata."""
        return self.metadata.get("general.architecture", "")

    @property
    def has_state(self) -> bool:
        """True for recurrent models and for hybrids, and those that are compressed."""
        handle = self.handle
        is_hybrid = lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle)
        return bool(is_hybrid) or self.is_compressed

    @property
    def is_compressed(self) -> bool:
        """True if its attention makes keys that stand for several tokens each, as these come."""
        return self.arch in _COMPRESSED

    @property
    def can_cut(self) -> bool:
        """True if the state of a sequence can be cut off at any position."""
        return not (self.has_state or self.window > 0)

    @property
    def cuttable(self) -> int:
        """The most cells of a sequence that can be cut, for models with a window."""
        return 0 if self.has_state else max(0, self.window - 1)

    @property
    def window(self) -> int:
        """The tokens that layers with a sliding window look back; 0: all layers see all."""
        return 0 if self._swa_full else self.n_swa

    @property
    def n_swa(self) -> int:
        """The width of the sliding window in tokens, even if the cache keeps more."""
        return int(lib.llama_model_n_swa(self.handle))

    def max_n_ctx_seq(self, config: Config) -> int:
        """Return how many tokens a sequence may have; see `longest`."""
        return longest(
            self.info.n_ctx_train, config, lambda: self.has_tensor((b"position_embd.weight",))
        )

    def has_tensor(self, names: Sequence[bytes]) -> bool:
        """True if the files have one of these tensors."""
        return gguf.has_tensor(Path(self.info.path), *names)

    def _check_kind(self, path: Path) -> None:
        handle = self.handle
        spec_type = FILE_TYPES.get(self.arch)
        if f"{self.arch}.nextn_predict_layers" in self.metadata and not gguf.has_tensor(
            path, b"blk.0.attn_norm.weight"
        ):
            spec_type = "draft-mtp"
        if spec_type is not None:
            raise ModelLoadError(
                f"{path} only makes drafts for another model: name it with spec_draft_model, and "
                f"set spec_type to '{spec_type}'."
            )
        if lib.llama_model_has_encoder(handle) or not lib.llama_model_has_decoder(handle):
            kind = "has an encoder that reads the prompt"
        elif lib.llama_model_is_diffusion(handle):
            kind = "is a diffusion model"
        elif lib.llama_vocab_type(lib.llama_model_get_vocab(handle)) == 0:
            kind = "has no vocabulary"
        else:
            return
        raise ModelLoadError(
            f"The model in {path}, of the architecture {self.arch}, {kind}; such models are not "
            "supported."
        )

    def _describe(self, path: Path, config: Config) -> ModelInfo:
        handle, vocab = self.handle, self.vocab
        template = lib.llama_model_chat_template(handle, None)
        ftype = lib.llama_ftype_name(lib.llama_model_ftype(handle))
        return ModelInfo(
            name=next(iter(config.aliases), unicode_name(path.name)),
            path=str(path),
            description=_text(lib.llama_model_desc, handle),
            ftype=(ftype or b"unknown").decode(errors="replace"),
            n_params=lib.llama_model_n_params(handle),
            size=lib.llama_model_size(handle),
            n_vocab=vocab.n_tokens,
            n_ctx_train=lib.llama_model_n_ctx_train(handle),
            n_embd=lib.llama_model_n_embd(handle),
            n_layer=lib.llama_model_n_layer(handle),
            vocab_type=lib.llama_vocab_type(vocab.handle),
            chat_template=None if template is None else template.decode(errors="replace"),
            bos_token=vocab.name_of(vocab.bos),
            eos_token=vocab.name_of(vocab.eos),
            add_bos=bool(lib.llama_vocab_get_add_bos(vocab.handle)),
            modified=int(path.stat().st_mtime),
            metadata=self.metadata,
        )


def longest(n_ctx_train: int, config: Config, has_positions: Callable[[], bool]) -> int:
    """Return how many tokens a sequence may have: as in training, or more with scaled RoPE.

    A table of positions cannot be scaled, and llama.cpp aborts the process beyond its end.

    Args:
        n_ctx_train: the context that the model was trained on.
        config: the configuration.
        has_positions: whether the file has such a table; asked only if RoPE is scaled.
    """
    stretch = max(1.0, 1 / (config.rope_freq_scale or 1.0))
    if stretch > 1 and has_positions():
        stretch = 1.0
    limit = int(n_ctx_train * stretch)
    return min(limit, config.kv_unified_per_slot or limit)


def _check_size(path: Path, config: Config) -> None:
    """Refuse weights that are read, not mapped, and larger than the memory that is free."""
    free = free_memory()
    if config.load_mode in _MAPPED or free is None or _may_offload(config):
        return
    if (size := gguf.total_size(gguf.parts_of(path))) > free:
        raise ModelLoadError(
            f"The model file {path} has {bytes_text(size)}, but only {bytes_text(free)} of memory "
            "are free; load_mode 'mmap' needs less."
        )


def _may_offload(config: Config) -> bool:
    return bool(lib.llama_supports_gpu_offload()) and config.n_gpu_layers != 0


def load_mode(path: Path, config: Config) -> str:
    """Choose how to load: into huge pages, where they are worth their memory.

    That needs twice the size of the file. A process that is not the first with this file maps it:
    its pages are shared with those that come later.
    """
    if config.load_mode != "auto" or not has_huge_pages() or _may_offload(config):
        return config.load_mode
    free, size = free_memory(), gguf.total_size(gguf.parts_of(path))
    has_room = free is not None and 2 * size <= free
    return "none" if has_room and not is_in_use(path) else "auto"


def _load_weights(path: Path, config: Config, progress: Progress | None, weights: bool) -> Any:
    """Load the weights and return llama.cpp's pointer. llama.cpp logs why it fails."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = config.n_gpu_layers
    params.load_mode = _LOAD_MODES[load_mode(path, config)]
    params.check_tensors = config.check_tensors
    params.load_mtp = config.head_type == "draft-mtp" and config.spec_draft_model is None
    if not weights:
        params.no_alloc, params.load_mode = True, _LOAD_MODES["none"]
    kept = devices.place(params, config)
    pages = HugePages()
    raised: list[BaseException] = []
    cancelled = False

    def on_progress(share: float, _data: object) -> bool:
        nonlocal cancelled
        if share == 0:  # memory is there for all weights, and none is read
            pages.advise()
        if progress is not None and not cancelled:
            try:
                cancelled = not progress(share)
            except BaseException as error:  # cannot be raised through C; raised again below
                raised.append(error)
                cancelled = True
        return not cancelled

    callback = lib.llama_progress_callback(on_progress)  # alive until the call returns
    params.progress_callback = callback
    library.take_errors()
    handle = lib.llama_model_load_from_file(os.fsencode(path), params)
    errors = library.take_errors()
    kept.clear()
    if handle is not None and cancelled:
        lib.llama_model_free(handle)
    if raised:
        raise raised[0]
    if cancelled:
        raise ModelLoadError(f"Loading the model {path} was cancelled.")
    if handle is None:
        why = library.reason(errors)
        if any(sign in line for line in errors for sign in _CUT_SHORT):
            size = path.stat().st_size
            raise ModelLoadError(f"The model file {path} is cut short at {size} bytes: {why}.")
        raise ModelLoadError(f"The model file {path} cannot be loaded: {why}.")
    return handle


def _metadata(handle: Any) -> dict[str, str]:
    """Read the scalar entries of the GGUF; llama.cpp does not return arrays."""
    return {
        _text(lib.llama_model_meta_key_by_index, handle, i): _text(
            lib.llama_model_meta_val_str_by_index, handle, i
        )
        for i in range(lib.llama_model_meta_count(handle))
    }


def _text(function: Any, *args: Any) -> str:
    """Call a C function that writes text to a buffer and returns its length."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = function(*args, buffer, size)
        if length < size:
            return buffer.value.decode(errors="replace")
        size = length + 1


def apply_chat_template(
    source: str, turns: Sequence[tuple[str, str]], add_generation_prompt: bool
) -> str | None:
    """Render pairs of role and content; None if llama.cpp has no template for this source.

    Roles and contents are C strings: a null character would end them, so there must be none.
    """
    library.check_library()
    chat = (lib.llama_chat_message * len(turns))()
    for message, (role, content) in zip(chat, turns, strict=True):
        message.role, message.content = role.encode(), content.encode()
    size = sum(len(one.encode()) for turn in turns for one in turn) * 2 + 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = lib.llama_chat_apply_template(
            source.encode(), chat, len(turns), add_generation_prompt, buffer, size
        )
        if length < 0:
            return None
        if length <= size:
            return bytes(buffer.raw[:length]).decode()
        size = length
