"""Which tools a server runs, and what is checked of their flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trioserve.config import Config
from trioserve.config.checks import BUILTIN_TOOLS
from trioserve.errors import ConfigError


def servers(**commands: str) -> str:
    return json.dumps({"mcpServers": {name: {"command": it} for name, it in commands.items()}})


def test_tools_are_off_unless_they_are_named() -> None:
    config = Config()
    assert not (config.builtin_tools or config.has_tools or config.has_mcp_proxy)


def test_tools_come_in_one_order() -> None:
    assert Config(tools=("get_info", "read_file")).builtin_tools == ("read_file", "get_info")
    assert Config(tools=("all",)).builtin_tools == BUILTIN_TOOLS


def test_an_agent_has_all_tools_and_the_proxy() -> None:
    config = Config(agent=True)
    assert config.builtin_tools == BUILTIN_TOOLS
    assert config.has_mcp_proxy


def test_servers_of_the_file_and_of_the_json_come_together(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(servers(a="one", b="two"))
    config = Config(mcp_servers_config=str(file), mcp_servers_json=servers(b="three", c="four"))
    commands = {name: one["command"] for name, one in config.mcp_servers()["mcpServers"].items()}
    assert commands == {"a": "one", "b": "three", "c": "four"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "mcp_servers_json is not valid JSON"),
        ("[]", "mcp_servers_json must be a JSON object with an object mcpServers"),
        ('{"mcpServers": []}', "mcp_servers_json must be a JSON object with an object mcpServers"),
    ],
)
def test_a_description_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(mcp_servers_json=text).mcp_servers()
    assert refused.value.message.startswith(message)


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match="mcp_servers_config: /no/such cannot be read"):
        Config(mcp_servers_config="/no/such").mcp_servers()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": ("cat",)}, "tools has 'cat', which is none of read_file"),
        ({"tools_dir": ("/no/such",)}, "tools_dir has '/no/such', which is not a directory"),
        ({"ui_mcp_proxy_hosts": ("a b",)}, "ui_mcp_proxy_hosts has 'a b', which is not HOST"),
    ],
)
def test_a_wrong_value_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(**fields)
    assert refused.value.message.startswith(message)


def test_an_extra_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install trioserve\[tools\]"):
        Config(tools=("read_file",))
    with pytest.raises(ConfigError, match=r"install trioserve\[mcp\]"):
        Config(mcp_servers_json=servers(one="a"))
    with pytest.raises(ConfigError, match=r"install trioserve\[media\]"):
        Config(mmproj="mmproj.gguf")
