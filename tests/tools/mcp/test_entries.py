"""The description of MCP servers, as Cursor reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from trioserve.tools.mcp.entries import HttpEntry, StdioEntry, read_entries
from trioserve.tools.mcp.tools import function_name

ENVIRON = {"KEY": "secret"}


def read(**entries: Any) -> list[StdioEntry | HttpEntry]:
    return read_entries({"mcpServers": entries}, Path("/work/shop"), ENVIRON)


def test_all_fields_of_a_program() -> None:
    entry = {
        "command": "${userHome}/server",
        "args": ["--root=${workspaceFolder}", "${workspaceFolderBasename}", "$HOME", "${other}"],
        "env": {"KEY": "${env:KEY}"},
        "cwd": "${workspaceFolder}/sub",
        "timeout_ms": 500,
        "type": "stdio",
    }
    assert read(a=entry) == [
        StdioEntry(
            name="a",
            command=f"{Path.home()}/server",
            args=("--root=/work/shop", "shop", "$HOME", "${other}"),
            env={"KEY": "secret"},
            cwd="/work/shop/sub",
            timeout=0.5,
        )
    ]


def test_all_fields_of_an_address() -> None:
    headers = {"Authorization": "Bearer ${env:KEY}"}
    url = "https://example.org/mcp"
    entry = HttpEntry(name="a", url=url, headers={"Authorization": "Bearer secret"}, timeout=30.0)
    assert read(a={"url": url, "headers": headers}) == [entry]
    assert read(a={"url": url, "headers": headers, "type": "streamable-http"}) == [entry]
    (older,) = read(a={"url": url, "type": "sse"})
    assert isinstance(older, HttpEntry)
    assert older.is_sse
    assert "secret" not in repr(entry)


PROBLEMS = [
    (7, "no JSON object"),
    ({}, "neither a command nor a url"),
    ({"command": ""}, "neither a command nor a url"),
    ({"command": "a", "url": "http://a"}, "both a command and a url"),
    ({"command": ["a"]}, "$.command"),
    ({"command": "a", "args": "b"}, "$.args"),
    ({"command": "a", "args": [1]}, "$.args[0]"),
    ({"command": "a", "env": {"A": 1}}, "$.env"),
    ({"command": "a", "env": {"A=B": "1"}}, "empty or holds ="),
    ({"command": "a\0b"}, "NUL"),
    ({"command": "a", "timeout_ms": 0}, "timeout_ms must be above 0"),
    ({"command": "a", "timeout_ms": "1"}, "$.timeout_ms"),
    ({"command": "a", "type": "http"}, "type 'http' does not go with a command"),
    ({"url": "http://a", "type": "stdio"}, "type 'stdio' does not go with a url"),
    ({"url": "http://a", "type": "websocket"}, "none of stdio, http and sse"),
    ({"url": "ftp://a"}, "must begin with http:// or https://"),
    ({"url": "http:///path"}, "name a host"),
    ({"command": "${env:NONE}"}, "the environment has no NONE"),
    ({"url": "http://a", "headers": {"A": "${input:token}"}}, "there is no person to ask"),
]


@pytest.mark.parametrize(("entry", "problem"), PROBLEMS)
def test_an_entry_that_makes_no_sense_is_skipped(entry: object, problem: str) -> None:
    with capture_logs() as logs:
        assert [entry.name for entry in read(bad=entry, good={"command": "a"})] == ["good"]
    assert [log["server"] for log in logs] == ["bad"]
    assert problem in logs[0]["problem"]


def test_a_disabled_entry_is_left_out() -> None:
    with capture_logs() as logs:
        assert read(a={"command": "a", "disabled": True}) == []
    assert logs == []


def test_fields_without_an_effect_are_told() -> None:
    with capture_logs() as logs:
        assert len(read(a={"command": "a", "autoApprove": ["x"], "envFile": ".env"})) == 1
    assert logs[0]["problem"] == "autoApprove, envFile: no such field has an effect"


@pytest.mark.parametrize("description", [{}, {"mcpServers": {}}, {"mcpServers": [1]}, {"a": {}}])
def test_a_description_without_servers(description: dict[str, Any]) -> None:
    with capture_logs() as logs:
        assert read_entries(description, Path("/"), ENVIRON) == []
    assert len(logs) == 1


def test_names_of_functions() -> None:
    assert function_name("echo", "echo") == "echo_echo"
    assert function_name("my server", "get.the/weather") == "my_server_get_the_weather"
    assert function_name("größe", "ö\ud800") == "gr__e___"
    long = function_name("a", "b" * 100)
    assert len(long) == 64
    assert long != function_name("a", "b" * 101)
    assert function_name("a", "b" * 62) == "a_" + "b" * 62


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    (entry,) = read(a={"command": "program", "args": ["${workspaceFolder}"]})
    assert entry == StdioEntry(name="a", command="program", args=("/work/shop",))
    with capture_logs() as logs:
        assert not read(a={"command": "${userHome}/program"})
    assert "no home folder" in logs[0]["problem"]
