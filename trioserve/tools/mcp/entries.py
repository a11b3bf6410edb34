"""`Entry`: an MCP server as a configuration describes it, in the form that Cursor reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from trioserve.log import get_logger

_log = get_logger("trioserve.tools")

#: Seconds for a call, if an entry sets no timeout.
DEFAULT_TIMEOUT = 30.0

_VARIABLE = re.compile(r"\$\{(env|input|command):([^}]*)\}|\$\{(\w+|/)\}")

#: The values of "type", each with its transport.
_TRANSPORTS = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamablehttp": "http",
    "streamable_http": "http",
    "sse": "sse",
}


@attrs.frozen(kw_only=True)
class StdioEntry:
    """A program that speaks on its standard input and output."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    #: Variables for its environment, added to those that every program gets.
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    #: The folder it is started in; None: the one of this process.
    cwd: str | None = None
    #: Seconds for a call.
    timeout: float = DEFAULT_TIMEOUT
    #: Folders that it may use.
    roots: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class HttpEntry:
    """A server at an address."""

    name: str
    url: str
    #: Added to every request.
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    #: It speaks the older transport, with a stream of events and a second address.
    is_sse: bool = False
    #: Seconds for a call.
    timeout: float = DEFAULT_TIMEOUT
    #: Folders that it may use.
    roots: tuple[str, ...] = ()


Entry = StdioEntry | HttpEntry


class _Fields(msgspec.Struct):
    """The fields of an entry that are known."""

    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str = ""
    timeout_ms: float = DEFAULT_TIMEOUT * 1000
    disabled: bool = False
    url: str = ""
    headers: dict[str, str] = {}
    type: str = ""


class _NotUsableError(Exception):
    """An entry cannot be used. The message ends the sentence "The MCP server NAME is skipped: "."""


def read_entries(
    description: Mapping[str, Any], folder: Path, environ: Mapping[str, str]
) -> list[Entry]:
    """Read ``mcpServers``. An entry that cannot be used is skipped, with a warning.

    Args:
        description: the whole JSON object.
        folder: the value of ``${workspaceFolder}``.
        environ: the values of ``${env:NAME}``.
    """
    entries = description.get("mcpServers", {})
    if not isinstance(entries, dict) or not entries:
        _log.warning("MCP servers", problem="the JSON has no mcpServers")
        return []
    found = []
    for name, value in entries.items():
        try:
            entry = _read(name, value, folder, environ)
        except _NotUsableError as error:
            _log.warning("MCP server skipped", server=name, problem=str(error))
            continue
        if entry is not None:
            found.append(entry)
    return found


def _read(name: str, value: Any, folder: Path, environ: Mapping[str, str]) -> Entry | None:
    if not isinstance(value, dict):
        raise _NotUsableError("its entry is no JSON object")
    try:
        fields = msgspec.convert(_expanded(value, folder, environ), _Fields)
    except msgspec.ValidationError as error:
        raise _NotUsableError(str(error)) from None
    if fields.disabled:
        return None
    if not 0 < fields.timeout_ms < float("inf"):
        raise _NotUsableError("timeout_ms must be above 0")
    unknown = sorted(value.keys() - set(_Fields.__struct_fields__))
    if unknown:
        _log.warning(
            "MCP server", server=name, problem=f"{', '.join(unknown)}: no such field has an effect"
        )
    transport = _transport(fields)
    timeout = fields.timeout_ms / 1000
    if transport == "stdio":
        _check_command(fields)
        return StdioEntry(
            name=name,
            timeout=timeout,
            command=fields.command,
            args=tuple(fields.args),
            env=fields.env,
            cwd=fields.cwd or None,
        )
    if not re.match(r"https?://[^/]", fields.url):
        raise _NotUsableError("url must begin with http:// or https:// and name a host")
    return HttpEntry(
        name=name,
        timeout=timeout,
        url=fields.url,
        headers=fields.headers,
        is_sse=transport == "sse",
    )


def _transport(fields: _Fields) -> str:
    if fields.command and fields.url:
        raise _NotUsableError("it has both a command and a url")
    if not fields.command and not fields.url:
        raise _NotUsableError("it has neither a command nor a url")
    default = "stdio" if fields.command else "http"
    transport = _TRANSPORTS.get(fields.type.lower() or default)
    if transport is None:
        raise _NotUsableError(f"type {fields.type!r} is none of stdio, http and sse")
    if (transport == "stdio") != (default == "stdio"):
        field = "a command" if default == "stdio" else "a url"
        raise _NotUsableError(f"type {fields.type!r} does not go with {field}")
    return transport


def _check_command(fields: _Fields) -> None:
    texts = [fields.command, fields.cwd, *fields.args, *fields.env, *fields.env.values()]
    if any("\0" in text for text in texts):
        raise _NotUsableError("a program cannot be given the character NUL")
    if any(not key or "=" in key for key in fields.env):
        raise _NotUsableError("env has a name that is empty or holds =")


def _expanded(value: Any, folder: Path, environ: Mapping[str, str]) -> Any:
    """A JSON value with the variables in its texts replaced."""
    if isinstance(value, dict):
        return {key: _expanded(item, folder, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, folder, environ) for item in value]
    if not isinstance(value, str):
        return value

    names = {
        "workspaceFolder": str(folder),
        "workspaceFolderBasename": folder.name,
        "userHome": os.path.expanduser("~"),  # "~", where the user has none
        "pathSeparator": "/",
        "/": "/",
    }

    def replaced(found: re.Match[str]) -> str:
        kind, name, plain = found.groups()
        if plain == "userHome" and names[plain] == "~":
            raise _NotUsableError(f"this user has no home folder, which {found[0]} stands for")
        if plain is not None:
            return names.get(plain, found[0])
        if kind != "env":
            raise _NotUsableError(f"there is no person to ask for {found[0]}")
        if name not in environ:
            raise _NotUsableError(f"the environment has no {name}, which {found[0]} stands for")
        return environ[name]

    return _VARIABLE.sub(replaced, value)
