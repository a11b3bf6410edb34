"""The API keys of a server: found, and read again when their file changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from trioserve.config import Config
from trioserve.config.keys import Key, digest_of
from trioserve.errors import AuthenticationError, ConfigError
from trioserve.server import keys as keys_module
from trioserve.server.keys import Keys


def table(name: str, shown: str, *lines: str) -> str:
    return "\n".join((f"[{name}]", f'hash = "sha256:{digest_of(shown).hex()}"', *lines, ""))


def replace(path: Path, text: str) -> None:
    """Write a file as `trioserve keys` does: another file takes its place."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def loaded(path: Path, **config: object) -> Keys:
    keys = Keys(Config(keys_file=str(path), **config))  # type: ignore[arg-type]
    keys.load()
    return keys


def test_keys_of_flags_may_do_everything() -> None:
    config = Config(api_keys=("a", "schlüssel"), api_key_priority=(3,), api_key_weights=(2.0,))
    keys = Keys(config)
    assert keys.needed and keys.number == 2 and keys.first == "a"
    found = keys.find("a")
    assert found == Key(
        name="key-1", digest=digest_of("a"), may_manage=True, priority=3, weight=2.0
    )
    second = keys.find("schlüssel")
    assert second is not None and (second.name, second.priority, second.weight) == ("key-2", 0, 1.0)
    for shown in ("", "A", "b", "\udcff"):
        assert keys.find(shown) is None
    with pytest.raises(AuthenticationError):
        keys.need("b")
    assert not Keys(Config()).needed


def test_a_key_in_an_error_or_a_log_line_is_not_readable() -> None:
    key = Keys(Config(api_keys=("secret",))).need("secret")
    assert "secret" not in repr(key) and digest_of("secret").hex() not in repr(key)


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    keys = loaded(path, api_keys=("own",))
    assert keys.need("a").name == "alice" and keys.need("own").name == "key-1"
    assert not keys.need("a").may_manage
    replace(path, table("bob", "b", "manage = true"))
    assert (await keys.check("b")).may_manage  # which is not known yet, so the file is looked at
    with pytest.raises(AuthenticationError):
        await keys.check("a")
    assert keys.find("own") is not None
    assert keys.shown.value == {"own", "b"}


async def test_a_removed_key_is_refused_without_a_request(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a") + table("bob", "b"))
    keys = loaded(path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keys.follow)
        replace(path, table("bob", "b"))
        while keys.find("a") is not None:
            await trio.sleep(1)
        assert keys.find("b") is not None
        nursery.cancel_scope.cancel()


async def test_the_file_is_followed_after_a_look_at_it_that_failed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    keys, n_failed = loaded(path), 0

    def fail(_path: str) -> None:
        nonlocal n_failed
        n_failed += 1
        raise MemoryError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keys.follow)
        with monkeypatch.context() as patch:
            patch.setattr(keys_module, "read_keys", fail)
            replace(path, table("bob", "b"))
            while not n_failed:
                await trio.sleep(1)
        while keys.find("b") is None:
            await trio.sleep(1)
        nursery.cancel_scope.cancel()


async def test_a_damaged_or_missing_file_leaves_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    keys = loaded(path)
    replace(path, table("alice", "a") + "[bob]\nhash = 3\n")
    keys.refresh()
    assert keys.find("a") is not None
    path.unlink()
    keys.refresh()
    assert keys.find("a") is not None
    replace(path, table("bob", "b"))
    keys.refresh()
    assert keys.find("a") is None and keys.find("b") is not None


def test_a_key_may_not_be_in_both(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    with pytest.raises(ConfigError, match="'alice' is key-1 of --api-key"):
        loaded(path, api_keys=("a",))


def test_until_the_file_is_read_its_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("alice", "a"))
    keys = Keys(Config(keys_file=str(path)))
    assert keys.needed and keys.find("a") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        loaded(tmp_path / "none.toml")
