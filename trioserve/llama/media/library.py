"""The functions of libmtmd, and what it logs.

It comes with llama_cpp, and is loaded when a model has a projector.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from trioserve.errors import BackendMismatchError
from trioserve.llama import library

#: Every function of libmtmd that this package calls. A test compares it with the sources.
FUNCTIONS = (
    "mtmd_bitmap_free", "mtmd_bitmap_init", "mtmd_bitmap_init_from_audio",
    "mtmd_bitmap_set_mergeable", "mtmd_context_params_default", "mtmd_decode_use_mrope",
    "mtmd_decode_use_non_causal", "mtmd_encode_chunk", "mtmd_free", "mtmd_get_audio_sample_rate",
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
        from llama_cpp import mtmd_cpp as mtmd
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
