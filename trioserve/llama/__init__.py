"""The llama.cpp backend: typed wrappers that check arguments to C and free what C allocates.

Only this package imports llama_cpp.

`library` finds the C functions and takes llama.cpp's log lines. `model`, `vocab`, `context`,
`batch` and `adapters` wrap one kind of C object each. `sampler` chooses tokens, as far as `grammar`
allows them. `devices` and `machine` describe the hardware. `backend` combines them for the engine,
and `embedding` for the embedding engine.
All arguments are checked before they reach C, because llama.cpp aborts the process on bad values.
Importing this package is cheap: the first call of `load` imports llama_cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.config import Config
    from trioserve.llama.backend import LlamaBackend
    from trioserve.llama.embedding import LlamaEmbedder

__all__ = ["LlamaBackend", "check_library", "load"]


def load(
    config: Config, *, progress: Callable[[float], bool] | None = None
) -> LlamaBackend | LlamaEmbedder:
    """Load a model and make its context. Blocks, for seconds or minutes: call it in a thread.

    Args:
        config: which file, how many sequences, how much context, how many threads.
        progress: called with the share of the weights that is loaded, 0.0 to 1.0, in the calling
            thread. Returning False cancels the load; what it raises is passed on.

    Raises:
        ModelLoadError: the file or the context cannot be used, or `progress` cancelled.
        BackendMismatchError: the installed llama.cpp is not one we can use.
    """
    return load_here(config, progress=progress)


def load_here(
    config: Config, *, progress: Callable[[float], bool] | None = None
) -> LlamaBackend | LlamaEmbedder:
    """Load as `load` does, without a trial."""
    if config.serves_embeddings:
        from trioserve.llama.embedding import LlamaEmbedder

        return LlamaEmbedder.load(config, progress=progress)
    from trioserve.llama.backend import LlamaBackend

    return LlamaBackend.load(config, progress=progress)


def check_library() -> None:
    """Check that the installed llama.cpp has every function that we call.

    Raises:
        BackendMismatchError: it does not; the message names what is missing.
    """
    from trioserve.llama import library

    library.check_library()


def __getattr__(name: str) -> Any:
    if name == "LlamaBackend":
        from trioserve.llama.backend import LlamaBackend

        return LlamaBackend
    raise AttributeError(f"module 'trioserve.llama' has no attribute {name!r}")
