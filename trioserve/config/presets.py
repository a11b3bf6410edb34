"""Flags that stand for several: llama-server's, each a model on the hub and settings for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_Fields = Mapping[str, Any]

_CODER = "ggml-org/Qwen2.5-Coder"
_SMALL_DRAFT = f"{_CODER}-0.5B-Q8_0-GGUF"

_INFILL: _Fields = {"port": 8012, "ubatch_size": 1024, "batch_size": 1024, "ctx_size": 0}
_GPT_OSS: _Fields = {
    "port": 8013, "ubatch_size": 2048, "batch_size": 32768, "parallel": 2, "ctx_size": 2 * 131072,
    "sampling.temperature": 1.0, "sampling.top_p": 1.0, "sampling.top_k": 0,
    "sampling.min_p": 0.01,
}  # fmt: skip
_GEMMA: _Fields = {"port": 8014, "ctx_size": 0}
_EMBEDDING: _Fields = {
    "port": 8011, "ubatch_size": 2048, "batch_size": 2048, "parallel": 32, "ctx_size": 32 * 2048,
    "embeddings": True,
}  # fmt: skip


def _coder(size: str, **more: str) -> _Fields:
    file = f"qwen2.5-coder-{size.lower()}-q8_0.gguf"
    return {"hf_repo": f"{_CODER}-{size}-Q8_0-GGUF", "hf_file": file, **more, **_INFILL}


#: Each with what it is, and the fields that it sets.
PRESETS: Mapping[str, tuple[str, _Fields]] = {
    "--embd-gemma-default": (
        "EmbeddingGemma 300M, for embeddings",
        {
            "hf_repo": "ggml-org/embeddinggemma-300M-qat-q4_0-GGUF",
            "hf_file": "embeddinggemma-300M-qat-Q4_0.gguf",
            **_EMBEDDING,
        },
    ),
    "--fim-qwen-1.5b-default": ("Qwen 2.5 Coder 1.5B, for infill", _coder("1.5B")),
    "--fim-qwen-3b-default": ("Qwen 2.5 Coder 3B, for infill", _coder("3B")),
    "--fim-qwen-7b-default": ("Qwen 2.5 Coder 7B, for infill", _coder("7B")),
    "--fim-qwen-7b-spec": (
        "Qwen 2.5 Coder 7B, for infill, with a draft model",
        _coder("7B", spec_draft_hf=_SMALL_DRAFT),
    ),
    "--fim-qwen-14b-spec": (
        "Qwen 2.5 Coder 14B, for infill, with a draft model",
        _coder("14B", spec_draft_hf=_SMALL_DRAFT),
    ),
    "--fim-qwen-30b-default": (
        "Qwen 3 Coder 30B A3B, for infill",
        {
            "hf_repo": "ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF",
            "hf_file": "qwen3-coder-30b-a3b-instruct-q8_0.gguf",
            **_INFILL,
        },
    ),
    "--gpt-oss-20b-default": (
        "gpt-oss 20B",
        {
            "hf_repo": "ggml-org/gpt-oss-20b-GGUF",
            "hf_file": "gpt-oss-20b-mxfp4.gguf",
            **_GPT_OSS,
        },
    ),
    "--gpt-oss-120b-default": (
        "gpt-oss 120B",
        {"hf_repo": "ggml-org/gpt-oss-120b-GGUF", **_GPT_OSS},
    ),
    "--vision-gemma-4b-default": (
        "Gemma 3 4B",
        {"hf_repo": "ggml-org/gemma-3-4b-it-qat-GGUF", **_GEMMA},
    ),
    "--vision-gemma-12b-default": (
        "Gemma 3 12B",
        {"hf_repo": "ggml-org/gemma-3-12b-it-qat-GGUF", **_GEMMA},
    ),
}
