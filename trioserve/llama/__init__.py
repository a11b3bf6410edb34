"""llama.cpp, typed and with every C object released on time. Only this package imports llama_cpp.

`library` finds the C functions and takes llama.cpp's log lines; `model`, `vocab`, `context`,
`memory`, `batch` and `sampling` wrap one C object each; `chain` turns `SamplingParams` into a
sampler chain; `machine` knows cores and memory; `backend` joins them into what the engine asks for,
and `embedding` into what the engine for embeddings does.
Everything that reaches C is checked first, because llama.cpp ends the process on bad values.
Importing this package is cheap: llama_cpp is imported by the first call of `load`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.config import ModelConfig
    from trioserve.llama.backend import LlamaBackend
    from trioserve.llama.embedding import LlamaEmbedder

__all__ = ["LlamaBackend", "check_library", "load"]


def load(
    config: ModelConfig, *, progress: Callable[[float], bool] | None = None
) -> LlamaBackend | LlamaEmbedder:
    """Load a model and make its context. Blocks, for seconds or minutes: call it in a thread.

    Args:
        config: which file, how many sequences, how much context, how many threads.
        progress: gets the share of the weights that is loaded, 0.0 to 1.0, in the calling thread;
            returning False gives up. What it raises passes through.

    Raises:
        ModelLoadError: the file or the context cannot be used, or `progress` gave up.
        BackendMismatchError: the installed llama.cpp is not one we can use.
    """
    if config.serves_embeddings:
        from trioserve.llama.embedding import LlamaEmbedder

        return LlamaEmbedder.load(config, progress=progress)
    from trioserve.llama.backend import LlamaBackend

    return LlamaBackend.load(config, progress=progress)


def check_library() -> None:
    """Check that the installed llama.cpp has what we call.

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
