"""`ToolsConfig`: which tools the server runs for a model, and what they may do."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from trioserve.config.model import ModelConfig
from trioserve.config.option import option
from trioserve.config.readers import parse_host, parse_json
from trioserve.errors import ConfigError

_tool = partial(option, group="Tools")

#: The tools that are built in, by the names that llama-server gives them, in its order.
BUILTIN_TOOLS = (
    "read_file",
    "file_glob_search",
    "grep_search",
    "exec_shell_command",
    "write_file",
    "edit_file",
    "get_info",
)

#: Stands for all of them in `tools`.
ALL_TOOLS = "all"


def _check_tools(config: ToolsConfig) -> None:
    for name in config.tools:
        if name not in (ALL_TOOLS, *BUILTIN_TOOLS):
            raise ConfigError(f"tools has {name!r}, which is none of {', '.join(BUILTIN_TOOLS)} "
                              f"and {ALL_TOOLS}")  # fmt: skip
    if config.builtin_tools and sys.platform == "win32":
        raise ConfigError("tools: the built-in tools do not run on Windows")


def _check_tools_dir(config: ToolsConfig) -> None:
    for path in config.tools_dir:
        if not Path(path).is_dir():
            raise ConfigError(f"tools_dir has {path!r}, which is not a directory")


def _check_mcp_servers(config: ToolsConfig) -> None:
    if config.has_mcp_servers and importlib.util.find_spec("mcp") is None:
        raise ConfigError("MCP servers need the package mcp: install trioserve[mcp]")


def _check_mcp_proxy(config: ToolsConfig) -> None:
    for text in config.ui_mcp_proxy_hosts:
        parse_host(text, "ui_mcp_proxy_hosts")


# fmt: off


@attrs.frozen(kw_only=True)
class ToolsConfig(ModelConfig):
    """Which tools the server runs, and what they may do. Names are llama-server's, where it has
    the same.

    Raises:
        ConfigError: a value cannot be used; the message names the field.
    """

    CHECKS = (
        *ModelConfig.CHECKS, _check_tools, _check_tools_dir, _check_mcp_servers, _check_mcp_proxy,
    )

    tools: tuple[str, ...] = _tool((), "--tools LLAMA_ARG_TOOLS",
        help="built-in tools, separated by commas, that the model and clients may use: read_file, "
        "file_glob_search, grep_search, exec_shell_command, write_file, edit_file, get_info; "
        "all = all of them")
    tools_dir: tuple[str, ...] = _tool((), "--tools-dir TRIOSERVE_TOOLS_DIR",
        help="directories, separated by commas, that these tools may read and write in; / = "
        "anywhere (as in llama-server); by default the one that the server is started in")
    tools_runtime: str | None = _tool(None, "--tools-runtime LLAMA_ARG_TOOLS_RUNTIME",
        help="where these tools run, if not on this machine: docker:IMAGE or podman:IMAGE, a "
        "container that the first call starts; docker-container:ID or podman-container:ID, "
        "one that runs already; ssh:TARGET, a host that takes the user's key")
    tools_max_processes: int = _tool(64,
        "--tools-max-processes TRIOSERVE_TOOLS_MAX_PROCESSES", min=1,
        help="maximum number of processes of one command; it is ended when it has more")
    tools_max_memory: int = _tool(2 * 2**30,
        "--tools-max-memory TRIOSERVE_TOOLS_MAX_MEMORY", min=0,
        help="bytes of memory that the processes of one command may use together; it is ended when "
        "they use more; 0 = no limit")
    mcp_servers_config: str | None = _tool(None,
        "--mcp-servers-config LLAMA_ARG_MCP_SERVERS_CONFIG",
        help="JSON file with MCP servers whose tools the model and clients may use, in the form "
        "that Cursor reads; it needs trioserve[mcp]")
    mcp_servers_json: str | None = _tool(None,
        "--mcp-servers-json LLAMA_ARG_MCP_SERVERS_JSON",
        help="the same JSON in place of a file, or beside one")
    agent: bool = _tool(False, "-ag --agent | -no-ag --no-agent LLAMA_ARG_AGENT",
        help="all built-in tools, and the proxy of --ui-mcp-proxy")
    ui_mcp_proxy: bool = _tool(False,
        "--ui-mcp-proxy --webui-mcp-proxy | --no-ui-mcp-proxy --no-webui-mcp-proxy "
        "LLAMA_ARG_UI_MCP_PROXY",
        help="let pages reach MCP servers of other origins through this server, at public "
        "addresses")
    ui_mcp_proxy_hosts: tuple[str, ...] = _tool((),
        "--ui-mcp-proxy-hosts TRIOSERVE_UI_MCP_PROXY_HOSTS",
        help="the only hosts that this proxy forwards to, separated by commas and written as for "
        "--media-urls; 127.0.0.1:3000=127.0.0.0/8 = a server on this machine; by default any "
        "public one")
    tool_max_steps: int = _tool(16, "--tool-max-steps TRIOSERVE_TOOL_MAX_STEPS", min=1,
        help="maximum number of answers that a request with trioserve_run_tools has the model "
        "give, the last one included")
    tool_approval_timeout: float = _tool(600.0,
        "--tool-approval-timeout TRIOSERVE_TOOL_APPROVAL_TIMEOUT", min=0.001,
        help="seconds that a call waits for a person's approval before it is refused")

    # fmt: on

    @property
    def builtin_tools(self) -> tuple[str, ...]:
        """The names of the built-in tools that are on, in the order of `BUILTIN_TOOLS`."""
        if self.agent or ALL_TOOLS in self.tools:
            return BUILTIN_TOOLS
        return tuple(name for name in BUILTIN_TOOLS if name in self.tools)

    @property
    def has_mcp_servers(self) -> bool:
        """Whether there is a description of MCP servers."""
        return self.mcp_servers_config is not None or self.mcp_servers_json is not None

    @property
    def has_tools(self) -> bool:
        """Whether the server may run tools: built-in ones, or those of MCP servers."""
        return bool(self.builtin_tools) or self.has_mcp_servers

    @property
    def has_mcp_proxy(self) -> bool:
        """Whether pages may reach MCP servers through this one."""
        return self.ui_mcp_proxy or self.agent

    def mcp_servers(self) -> dict[str, Any]:
        """Read the descriptions of MCP servers: a JSON object with ``mcpServers``, or an empty one.

        Reads the file, if there is one. Of two servers with the same name, the one that is not in
        the file counts.

        Raises:
            ConfigError: the file cannot be read, or one of them is no JSON object.
        """
        texts = []
        if (path := self.mcp_servers_config) is not None:
            source = f"mcp_servers_config, the file {path},"
            try:
                texts.append((source, Path(path).read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{source} cannot be read: {error}") from None
        if self.mcp_servers_json is not None:
            texts.append(("mcp_servers_json", self.mcp_servers_json))
        described: dict[str, Any] = {}
        for source, text in texts:
            described = _merged(described, parse_json(text, source), source)
        return described


def _merged(before: dict[str, Any], value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("mcpServers", {}), dict):
        raise ConfigError(f"{source} must be a JSON object with an object mcpServers")
    if servers := before.get("mcpServers"):
        value = {**value, "mcpServers": servers | value.get("mcpServers", {})}
    return {**before, **value}
