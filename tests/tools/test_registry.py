"""The box has the tools that the configuration allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mcp_servers import config_of, odd
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, UnknownToolError
from trioserve.tools.registry import ToolRegistry, open_registry, select
from trioserve.tools.tool import ToolCallContext


def config(folder: Path, *tools: str) -> Config:
    return Config(model="m.gguf", tools=tools, tools_dir=(str(folder),))


async def test_a_box_without_tools_is_empty() -> None:
    async with open_registry(Config(model="m.gguf")) as box:
        assert (dict(box.tools), box.abilities()) == ({}, [])
    with pytest.raises(UnknownToolError, match='unknown tool "read_file"'):
        ToolRegistry().find("read_file")


async def test_tools_are_found_and_called_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line")
    async with open_registry(config(tmp_path, "read_file")) as box:
        assert list(box.tools) == ["read_file"]
        result = await box.find("read_file").call({"path": "a.txt"}, ToolCallContext())
        assert result.text == "line\n"
        with pytest.raises(UnknownToolError, match="does not support stream = true"):
            box.find("read_file", streams=True)


async def test_tools_are_selected_by_names_and_globs(tmp_path: Path) -> None:
    async with open_registry(config(tmp_path, "all")) as box:
        assert list(select(box.tools, ["read_*"])) == ["read_file"]
        assert list(select(box.tools, ["read_file", "rea?_file", "read_file"] * 1000)) == [
            "read_file"
        ]
        assert list(select(box.tools, ["*"])) == list(box.tools)
        assert select(box.tools, ["weather_*"]) == {}
        with pytest.raises(InvalidRequestError, match="has no tool 'weather'"):
            select(box.tools, ["weather"])


async def test_what_the_server_may_do_is_said(tmp_path: Path) -> None:
    async with open_registry(config(tmp_path, "read_file")) as box:
        assert box.abilities() == [
            f"The model and clients may read files in {tmp_path}: read_file."
        ]
    async with open_registry(config(Path("/"), "read_file")) as box:
        assert "read files anywhere" in box.abilities()[0]


async def test_of_two_tools_with_one_name_the_first_counts(tmp_path: Path) -> None:
    async with (
        open_registry(config(tmp_path, "read_file")) as box,
        open_registry(config(tmp_path, "all")) as other,
    ):
        both = ToolRegistry([box, other])
        assert list(both.tools) == list(other.tools)
        assert both.find("read_file") is both.tools["read_file"] is box.tools["read_file"]
        assert both.abilities() == [*box.abilities(), *other.abilities()]


@pytest.mark.system
async def test_the_tools_of_mcp_servers_are_there_once_they_are_listed() -> None:
    async with open_registry(config_of(odd=odd())) as box:
        await box.listed()
        assert box.find("odd_echo", streams=True).info.mcp_server == "odd"
        assert "odd" in box.abilities()[0]
