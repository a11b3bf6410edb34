"""`trioserve mcp login`, beside what `tests/tools/mcp/test_login.py` has of the login itself."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.support.oauth_mcp import OAuth
from tests.tools.mcp.test_login import oauth
from trioserve.cli.main import main
from trioserve.tools.mcp.credentials import load, path_of

__all__ = ["oauth"]


def test_the_command(
    oauth: OAuth, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {"a": {"url": oauth.url}, "b": {"command": "x"}}
    flags = ["--mcp-servers-json", json.dumps({"mcpServers": entries})]
    monkeypatch.setattr("webbrowser.open", lambda url: urllib.request.urlopen(url).read())
    assert main(["mcp", "login", "a", *flags]) == 0
    assert str(path_of(oauth.url)) in capsys.readouterr().err
    assert load(oauth.url) is not None
    assert main(["mcp", "login", "b", *flags]) != 0
    assert "there are: a" in capsys.readouterr().err
    assert main(["mcp", "logout", "a", *flags]) != 0
