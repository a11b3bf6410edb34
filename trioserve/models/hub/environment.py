"""What the environment says of the hub, in the variables of huggingface_hub and llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_ENDPOINT = "https://huggingface.co"
_TRUE = frozenset({"1", "on", "yes", "true"})


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where models are kept: where llama.cpp and huggingface_hub keep them."""
    for name, *rest in (
        ("LLAMA_CACHE",),
        ("HF_HUB_CACHE",),
        ("HUGGINGFACE_HUB_CACHE",),
        ("HF_HOME", "hub"),
    ):
        if folder := environ.get(name):
            return Path(folder, *rest).expanduser()
    return _home(environ) / "hub"


def default_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """The address of the hub."""
    return environ.get("MODEL_ENDPOINT") or environ.get("HF_ENDPOINT") or _ENDPOINT


def default_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The token of whoever runs this: from a variable, or left by ``hf auth login``."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := environ.get(name, "").strip():
            return token
    home = environ.get("HF_HOME")
    path = environ.get("HF_TOKEN_PATH") or (Path(home) if home else _home(environ)) / "token"
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether huggingface_hub's variable says that nothing is to be downloaded."""
    return environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE


def _home(environ: Mapping[str, str]) -> Path:
    """The folder of huggingface_hub, where no variable names it."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface"
