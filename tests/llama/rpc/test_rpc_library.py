"""The library with ggml's RPC backend is checked before it is loaded, and so are the machines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from tests.support.rpc_peer import VERSION, answers, listening
from trioserve.config import Config
from trioserve.errors import ConfigError, ModelLoadError
from trioserve.llama import devices
from trioserve.llama.rpc import library
from trioserve.llama.rpc.library import Built

CONTENT = b"a library"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A library that is never loaded."""
    path = library.path_in(tmp_path)
    path.write_bytes(CONTENT)
    path.chmod(0o755)
    digest = hashlib.sha256(CONTENT).hexdigest()
    made = Built(path, VERSION, library.ggml_version(), digest)
    made.write()
    return made


def test_what_was_built_is_found(built: Built) -> None:
    assert library.find(built.path.parent) == built


def test_the_name_says_for_what_it_was_built() -> None:
    assert library.path_in(Path("/x")).name.startswith("ggml-rpc-0.3.")


def test_there_is_a_folder_for_it() -> None:
    assert library.folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/trioserve/rpc")
    assert library.folder({}) == Path.home() / ".cache/trioserve/rpc"


def damage(built: Built) -> None:
    built.path.write_bytes(CONTENT[:-1])


def lose_the_note(built: Built) -> None:
    built.note.unlink()


def spoil_the_note(built: Built) -> None:
    built.note.write_text('{"protocol": [7]}', encoding="utf-8")


def open_to_others(built: Built) -> None:
    built.path.chmod(0o777)


def open_the_folder(built: Built) -> None:
    built.path.parent.chmod(0o777)


def be_of_another_version(built: Built) -> None:
    attrs.evolve(built, ggml="0.1.2").write()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_the_note, "rpc needs a library that is not there yet; run `trioserve rpc build`"),
        (spoil_the_note, r"cannot be read .* run `trioserve rpc build` again"),
        (damage, "is not the file that was built; run"),
        (open_to_others, "may be changed by other users, so it is not loaded"),
        (open_the_folder, "may be changed by other users, so it is not loaded"),
        (be_of_another_version, r"is for ggml 0\.1\.2, and 0\..* is installed; run"),
    ],
)
def test_what_is_not_as_it_was_built_is_not_loaded(
    built: Built, change: Callable[[Built], None], message: str
) -> None:
    change(built)
    with pytest.raises(ConfigError, match=message):
        library.find(built.path.parent)


# -- the machines


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A backend that writes down which servers it gets."""
    added: list[bytes] = []

    class Fake(library.RpcBackend):
        def function(self, named: object) -> Callable[[bytes], int]:
            assert named is library.ADD

            def add(address: bytes) -> int:
                added.append(address)
                return 1

            return add

    def no_registry(name: str) -> Callable[[int], None]:
        assert name == "ggml_backend_register"
        return lambda _: None

    monkeypatch.setattr(library, "backend", lambda: Fake(0, VERSION))
    monkeypatch.setattr(library, "ggml", no_registry)
    monkeypatch.setattr(library, "_addresses", {})
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    return added


def test_machines_are_added_once_and_checked_each_time(backend: list[bytes]) -> None:
    with listening(answers()) as one:
        with listening(answers()) as two:
            config = Config(rpc=(one, two))
            library.connect(config)
            library.connect(config)
            assert backend == [one.encode(), two.encode()]
        with pytest.raises(ModelLoadError, match=f"The RPC server {two} cannot be reached"):
            library.connect(config, timeout=0.1)


@pytest.mark.parametrize("version", [(6, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 1)])
def test_another_version_of_the_protocol_is_refused(
    backend: list[bytes], version: tuple[int, int, int]
) -> None:
    theirs = ".".join(map(str, version))
    with (
        listening(answers(version)) as address,
        pytest.raises(ModelLoadError, match=f"speaks version {theirs} of .* this machine 7.0.0;"),
    ):
        library.connect(Config(rpc=(address,)))
    assert backend == []


def test_a_machine_under_two_names(backend: list[bytes]) -> None:
    with listening(answers()) as address:
        other = address.replace("127.0.0.1", "localhost")
        with pytest.raises(ModelLoadError, match=f"rpc names the machine at {address} twice"):
            library.connect(Config(rpc=(address, other)))
    assert backend == [address.encode()]


def test_without_a_library_the_model_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> library.RpcBackend:
        raise ConfigError("rpc needs a library")

    monkeypatch.setattr(library, "backend", missing)
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    with pytest.raises(ModelLoadError, match="rpc needs a library"):
        library.connect(Config(rpc=("10.0.0.1:50052",)))


def test_no_device_here_is_on_another_machine() -> None:
    assert not any(one.remote for one in devices.devices())
