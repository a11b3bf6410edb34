"""A user without a home folder: no variable names it, nor does the system."""

from __future__ import annotations

import pwd

import pytest

_VARIABLES = (
    "HOME", "XDG_CACHE_HOME", "LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
    "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN",
)  # fmt: skip


def be_homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Become such a user."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
