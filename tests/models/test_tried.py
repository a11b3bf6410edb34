"""Files that this machine has loaded before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from trioserve.config import Config
from trioserve.models import BUNDLED, tried
from trioserve.models.speech import BUNDLED_VOICE
from trioserve.models.tried import LoadedFiles

pytestmark = pytest.mark.new_files


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tried, "_here", set())
    return tmp_path / "state" / "trioserve" / "loaded"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))


def files(model: Path | None, version: str = "1", **settings: object) -> LoadedFiles:
    path = None if model is None else str(model)
    return LoadedFiles.of(Config(model=path, **settings), version)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another process."""
    monkeypatch.setattr(tried, "_here", set())


def test_files_are_known_once_they_were_loaded(
    model: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not files(model).are_known
    files(model).remember()
    forget(monkeypatch)
    assert files(model).are_known
    assert [one.stat().st_size for one in state.iterdir()] == [0]


def test_what_makes_files_new_again(model: Path, tmp_path: Path) -> None:
    files(model).remember()
    adapter = tmp_path / "lora.gguf"
    adapter.write_bytes(b"x")
    assert not files(model, version="2").are_known
    assert not files(model, embeddings=True).are_known
    assert not files(model, spec_type=("draft-mtp",)).are_known
    assert not files(model, lora=(str(adapter),)).are_known
    os.utime(model, ns=(1, 1))
    assert not files(model).are_known
    files(model).remember()
    copy = tmp_path / "copy.gguf"
    shutil.copy2(model, copy)
    copy.replace(model)  # of the same size and time
    assert not files(model).are_known
    model.unlink()
    assert not files(model).are_known


def test_the_bundled_model_and_its_voice_are_trusted(state: Path, tmp_path: Path) -> None:
    assert files(None).are_known
    files(None).remember()
    assert not state.exists()
    assert files(BUNDLED_VOICE.model, mmproj=str(BUNDLED_VOICE.projector)).are_known
    adapter = tmp_path / "lora.gguf"
    adapter.write_bytes(b"x")
    assert not files(None, lora=(str(adapter),)).are_known


def test_a_process_remembers_without_a_folder(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("no folder", encoding="utf-8")
    files(model).remember()
    assert files(model).are_known
    forget(monkeypatch)
    assert not files(model).are_known


def test_without_a_home(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    files(model).remember()
    assert files(model).are_known


def test_the_oldest_are_forgotten(
    model: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "_MAX_KEPT", 2)
    for i, version in enumerate("abc"):
        files(model, version).remember()
        if (made := state / files(model, version).fingerprint).exists():
            os.utime(made, (i, i))
    files(model, "d").remember()
    forget(monkeypatch)
    assert [version for version in "abcd" if files(model, version).are_known] == ["c", "d"]
