"""A hub in a thread, a cache of the test's own, and no waiting between two tries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.server import Hub, running_hub
from trioserve.models.hub import client, download

_OTHERS = (
    "LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "MODEL_ENDPOINT", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "XDG_CACHE_HOME",
)  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that the environment names, with an empty cache."""
    for name in _OTHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "FIRST_WAIT", 0)
    monkeypatch.setattr(download, "FIRST_WAIT", 0)
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Where the models of the test are."""
    return tmp_path / "hf" / "hub"
