"""Programs that are configured by a file: what is written, and how it is undone."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from tests.support.http_server import serving_script
from trioserve.cli.agents import CONFIGURED, Endpoint
from trioserve.cli.configured import Settings
from trioserve.cli.jsonc import Document
from trioserve.cli.main import main
from trioserve.errors import ConfigError

HERE = Endpoint(url="http://127.0.0.1:8080", model="qwen3", context=65536, api_key="sk-mine")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "XDG_STATE_HOME": ""}


@pytest.fixture
def zed(environ: dict[str, str]) -> Settings:
    return Settings.of("zed", environ)


def apply(settings: Settings, endpoint: Endpoint = HERE) -> str:
    _, text, record = settings.planned(endpoint)
    settings.apply(text, record)
    return text


def undo(settings: Settings) -> list[str]:
    _, text, kept = settings.undo_planned()
    settings.undo(text)
    return list(kept)


def write(settings: Settings, text: str) -> None:
    settings.path.parent.mkdir(parents=True, exist_ok=True)
    settings.path.write_text(text, encoding="utf-8")


# -- the documented formats

_COST = {"input": int, "output": int, "cacheRead": int, "cacheWrite": int}

#: The types of the values, as the makers of the programs describe them.
SHAPES: dict[str, Any] = {
    "vscode": [{
        "name": str, "vendor": str, "apiKey": str, "apiType": str,
        "models": [{
            "id": str, "name": str, "url": str, "toolCalling": bool, "vision": bool,
            "maxInputTokens": int, "maxOutputTokens": int,
        }],
    }],
    "zed": {"language_models": {"openai_compatible": {"trioserve": {
        "api_url": str,
        "available_models": [{
            "name": str, "display_name": str, "max_tokens": int, "max_output_tokens": int,
            "capabilities": {
                "tools": bool, "images": bool, "parallel_tool_calls": bool,
                "prompt_cache_key": bool,
            },
        }],
    }}}},
    "openclaw": {
        "models": {"providers": {"trioserve": {
            "baseUrl": str, "apiKey": str, "api": str,
            "models": [{
                "id": str, "name": str, "input": [str], "cost": _COST, "contextWindow": int,
                "maxTokens": int, "reasoning": bool,
            }],
        }}},
        "agents": {"defaults": {"model": {"primary": str}}},
    },
    "junie": {
        "id": str, "baseUrl": str, "apiType": str, "apiKey": str, "maxContextLength": int,
    },
}  # fmt: skip


def shape_of(value: Any) -> Any:
    match value:
        case dict():
            return {key: shape_of(each) for key, each in value.items()}
        case list():
            return [shape_of(value[0])]
    return type(value)


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_file_has_the_documented_form(name: str, environ: dict[str, str]) -> None:
    settings = Settings.of(name, environ)
    written = json.loads(apply(settings))
    assert shape_of(written) == SHAPES[name]
    assert "qwen3" in json.dumps(written)
    assert settings.path.read_text() == apply(settings)  # a second time changes nothing
    assert stat.S_IMODE(settings.path.stat().st_mode) == 0o600  # it has the key
    assert undo(settings) == []
    assert not settings.path.exists()
    with pytest.raises(ConfigError, match="launch has changed nothing of"):
        settings.undo_planned()


# -- files of users

THEIRS = """// mine
{
  "theme": "One Dark", // dark
  "language_models": {
    "ollama": {"api_url": "http://x"},
  },
}
"""


def test_the_rest_of_a_file_stays_as_it_is(zed: Settings) -> None:
    write(zed, THEIRS)
    zed.path.chmod(0o640)
    text = apply(zed)
    assert text.replace("\n", "").startswith(THEIRS[: THEIRS.index("  },")].replace("\n", ""))
    assert stat.S_IMODE(zed.path.stat().st_mode) == 0o640
    assert undo(zed) == []
    assert zed.path.read_text() == THEIRS


def _twice(text: str) -> str:
    return text.replace("One Dark", "One Light")


@pytest.mark.parametrize("again", [False, True])
def test_undoing_after_the_user_has_changed_the_file(zed: Settings, again: bool) -> None:
    write(zed, THEIRS)
    apply(zed)
    zed.path.write_text(_twice(zed.path.read_text()))
    if again:
        apply(zed, attrs.evolve(HERE, model="other"))
        assert "qwen3" not in zed.path.read_text()
    assert undo(zed) == []
    left = Document(zed.path.read_text())
    assert left.value(()) == Document(_twice(THEIRS)).value(())
    assert "// dark" in left.text


def test_what_the_user_has_changed_of_ours_stays(environ: dict[str, str]) -> None:
    settings = Settings.of("openclaw", environ)
    write(settings, '{"agents": {"defaults": {"model": {"primary": "a/b"}}}}')
    apply(settings)
    settings.path.write_text(settings.path.read_text().replace('"id": "qwen3"', '"id": "mine"'))
    assert undo(settings) == ["models.providers.trioserve"]
    left = Document(settings.path.read_text())
    assert left.value(("agents", "defaults", "model", "primary")) == "a/b"
    assert left.value(("models", "providers", "trioserve", "models"))[0]["id"] == "mine"


def test_a_file_that_is_gone(zed: Settings) -> None:
    write(zed, THEIRS)
    apply(zed)
    zed.path.unlink()
    assert undo(zed) == []
    assert not zed.path.exists()
    assert not zed.record_path.exists()


def test_a_link_stays_one(zed: Settings, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles" / "settings.json"
    target.parent.mkdir()
    target.write_text(THEIRS)
    zed.path.parent.mkdir(parents=True)
    zed.path.symlink_to(target)
    apply(zed)
    assert zed.path.is_symlink() and "trioserve" in target.read_text()
    undo(zed)
    assert zed.path.is_symlink() and target.read_text() == THEIRS


def _read_only(settings: Settings) -> None:
    write(settings, THEIRS)
    settings.path.chmod(0o444)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_read_only, "is read-only; nothing was changed"),
        (lambda one: write(one, '{\n"a": }'), "line 2 is not JSON; nothing was changed"),
        (lambda one: write(one, '{"language_models": 1}'), "cannot be set: .*; nothing was"),
        (lambda one: (one.path.parent.mkdir(parents=True), one.path.write_bytes(b"\xff")), "UTF-8"),
        (lambda one: one.path.mkdir(parents=True), "cannot be read"),
        (lambda one: (one.record_path.parent.parent.mkdir(parents=True),
                      one.record_path.parent.write_text("x")), "cannot be made"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_changed(
    zed: Settings, spoil: Callable[[Settings], object], problem: str
) -> None:
    spoil(zed)
    before = zed.path.read_bytes() if zed.path.is_file() else None
    with pytest.raises(ConfigError, match=problem):
        apply(zed)
    if before is not None:
        assert zed.path.read_bytes() == before
    assert not zed.record_path.exists()


def test_a_record_that_is_damaged(zed: Settings) -> None:
    apply(zed)
    zed.record_path.write_text("{")
    with pytest.raises(ConfigError, match=r"zed\.json cannot be read"):
        zed.undo_planned()


# -- the command


@pytest.mark.system
async def test_the_command(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import trio

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = Settings.of("vscode", environ)

    async def launch(*words: str) -> tuple[int, str, str]:
        code = await trio.to_thread.run_sync(main, ["launch", "vscode", *words])
        return code, *capsys.readouterr()

    async with serving_script(api_keys=("sk-mine",)) as (url, _):
        where = ("--url", url, "--api-key", "sk-mine")
        code, shown, _ = await launch(*where, "--dry-run")
        assert (code, settings.path.exists()) == (0, False)
        assert '+    "vendor": "customendpoint",' in shown and "sk-mine" not in shown
        code, shown, told = await launch(*where)
        assert (code, json.loads(settings.path.read_text())[0]["apiKey"]) == (0, "sk-mine")
        assert "sk-mine" not in shown + told
        model = json.loads(settings.path.read_text())[0]["models"][0]
        async with httpx.AsyncClient() as client:
            key = {"Authorization": "Bearer sk-mine"}
            body = {"model": model["id"], "messages": [{"role": "user", "content": "Hi"}]}
            answer = await client.post(model["url"], json=body, headers=key)
        assert answer.status_code == 200
    code, shown, _ = await launch("--undo", "--dry-run")
    assert (code, settings.path.exists()) == (0, True) and '-    "vendor"' in shown
    code, _, _ = await launch("--undo")
    assert (code, settings.path.exists()) == (0, False)
    code, _, told = await launch("--url", url)
    assert code != 0 and "No server answers" in told
