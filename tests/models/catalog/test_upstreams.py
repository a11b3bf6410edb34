"""Upstreams in a file of presets, and the secrecy of their API keys."""

from __future__ import annotations

import logging
from pathlib import Path

import attrs
import pytest

from trioserve.config import Config
from trioserve.errors import ConfigError, UnknownModelError
from trioserve.models.catalog import Catalog, ModelEntry, Source
from trioserve.models.catalog.presets import read_presets, read_upstreams

KEY = "sk-very-secret"


def write(folder: Path, text: str) -> Path:
    path = folder / "presets.ini"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_keys(tmp_path: Path) -> None:
    text = """
[m]
model = m.gguf
[upstream.a]
url = https://example.org/api/v1/   ; where it is
key-env = THE_KEY
key-header = x-api-key
models = gpt = openai/gpt-5, qwen3
prefix = a/
apis = chat, messages
connect-timeout = 2.5
timeout = 30
max-requests = 3
[upstream.b]
url = http://localhost:8081/v1
"""
    path = write(tmp_path, text)
    first, second = read_upstreams(path, {"THE_KEY": f" {KEY}\n"}).values()
    assert attrs.asdict(first) == {
        "name": "a", "url": "https://example.org/api/v1", "key_env": "THE_KEY",
        "key_header": "x-api-key", "models": (("gpt", "openai/gpt-5"), ("qwen3", "qwen3")),
        "prefix": "a/", "apis": ("chat", "messages"), "connect_timeout": 2.5, "timeout": 30.0,
        "max_requests": 3, "key": KEY,
    }  # fmt: skip
    assert first.headers == [(b"x-api-key", KEY.encode())]
    assert KEY not in repr(first)
    assert (second.headers, second.models) == ([], ())
    assert read_presets(path)[1].keys() == {"m"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("urls = x", " urls is not known; did you mean url?"),
        ("url = ftp://x", " url: 'ftp://x' is no address, such as https://example.org/v1"),
        ("url = https://x/v1?k=1", " url: 'https://x/v1?k=1' is no address"),
        ("url = https://[x/v1", " url: "),
        (f"url = https://{'x' * 64}.example/v1", " url: "),
        ("url = https://x/v\u0308", " url: "),
        ("url = https://me:pw@x/v1", " url: an address has no password"),
        ("models = a=", " models: 'a=' is no list of names"),
        ("apis = chat, speech", " apis: 'speech' is not one of chat, completions"),
        ("key-header = cookie", " key-header: 'cookie' is not one of"),
        ("timeout = 0", " timeout: '0' is no number of seconds above 0"),
        ("max-requests = 0", " max-requests: '0' must be at least 1"),
        ("key-env = NONE", " key-env: NONE is not set, or is no API key"),
        ("key-env = TWO_LINES", " key-env: TWO_LINES is not set, or is no API key"),
        ("url =", " url: '' is no address"),
        ("timeout = 3", " needs the key url"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, line: str, problem: str) -> None:
    start = "" if line.startswith(("url", "timeout = 3")) else "url = http://x/v1\n"
    path = write(tmp_path, f"[upstream.a]\n{start}{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_upstreams(path, {"TWO_LINES": f"{KEY}\n{KEY}"})
    assert caught.value.message.startswith(f"{path}: [upstream.a]{problem}")
    assert KEY not in caught.value.message


@pytest.mark.parametrize(("host", "warns"), [("10.0.0.1", True), ("localhost", False)])
def test_a_key_that_is_sent_in_the_clear_is_warned_of(
    tmp_path: Path, host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, f"[upstream.a]\nurl = http://{host}:1/v1\nkey-env = K\n")
    with caplog.at_level(logging.WARNING):
        read_upstreams(path, {"K": KEY})
    assert ("without encryption" in caplog.text) == warns
    assert KEY not in caplog.text


def test_models_are_offered_beside_those_that_are_here(tmp_path: Path) -> None:
    (tmp_path / "here.gguf").write_bytes(b"1")
    text = "[here]\nmodel = x.gguf\n[upstream.a]\nurl = http://x/v1\nkey-env = K\n"
    where = Config(models_preset=str(write(tmp_path, text)), models_default="far")
    catalog = Catalog(where, (), {"K": KEY, "HOME": "/"})
    assert catalog.environment == {"HOME": "/"}
    (upstream,) = catalog.upstreams.values()
    assert not catalog.entries["bundled"].load_on_startup
    with pytest.raises(UnknownModelError):
        catalog.find("far")
    offered = {
        name: ModelEntry(name=name, source=Source.UPSTREAM, args=(), path=None, upstream=upstream)
        for name in ("far", "here")
    }
    catalog.offer(offered)
    assert catalog.find("anything").upstream is upstream  # the default
    assert catalog.find("here").upstream is None
    write(tmp_path, text + "[upstream.b]\nurl = http://y/v1\nkey-env = HOME\n")
    catalog.reload()
    assert catalog.exact("far").upstream is upstream
    assert catalog.environment == {}
