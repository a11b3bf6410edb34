"""``trioserve config``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import jsonschema
import pytest

from trioserve.cli.commands.config import file_schema
from trioserve.cli.main import main
from trioserve.config.parse import parse


def test_a_new_file_changes_nothing_and_each_line_of_it_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trioserve.toml"
    assert main(["config", "init", str(path)]) == 0
    assert parse(["--config", str(path)], {}).sources == {}
    settings = [
        line[1:]
        for line in path.read_text().splitlines()
        if line[:1] == "#" and line[1:2].isalpha()
    ]
    assert len(settings) > 150
    validator = jsonschema.Draft202012Validator(file_schema())
    for line in settings:
        (value,) = tomllib.loads(line).values()
        if value in ("", []):  # not set
            continue
        path.write_text(line)
        parse(["--config", str(path)], {})
        validator.validate(tomllib.loads(line))
    assert main(["config", "init", str(path)]) == 2
    assert "File exists" in capsys.readouterr().err


def test_the_schema_finds_mistakes() -> None:
    jsonschema.Draft202012Validator.check_schema(file_schema())
    jsonschema.validate({"ctx-size": 4096, "api-key": ["a", "b"], "metrics": True}, file_schema())
    for wrong in ({"ctx-sise": 1}, {"metrics": 1}, {"flash-attn": "maybe"}, {"ctx-size": "many"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, file_schema())


def test_where_values_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.toml"
    path.write_text('parallel = 8\nctx-size = 1\napi-key = "secret"\n')
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "512")
    servers = '{"mcpServers": {"a": {"command": "a", "env": {"TOKEN": "secret"}}}}'
    monkeypatch.setenv("LLAMA_ARG_MCP_SERVERS_JSON", servers)
    assert main(["config", "show", "--config", str(path), "--temp", "0.5"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["SETTING", "VALUE", "FROM"]
    assert {tuple(row) for row in rows[1:]} == {
        ("parallel", "8", f"{path}:1: parallel"),
        ("ctx-size", "512", "LLAMA_ARG_CTX_SIZE"),
        ("api-key", "(hidden)", f"{path}:3: api-key"),
        ("temperature", "0.5", "--temp"),
        ("mcp-servers-json", "(hidden)", "LLAMA_ARG_MCP_SERVERS_JSON"),
    }
    assert main(["config", "show", "--all"]) == 0
    assert "the default" in capsys.readouterr().out


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for words, problem in (
        ([], "config needs an action; its actions are init, show, schema"),
        (["shwo"], "config has no action 'shwo'; did you mean show?"),
        (["init"], "config init needs FILE; usage: trioserve config init FILE"),
        (["schema", "a"], "config schema does not take 'a'"),
        (["schema", "-c", "5"], "-c is not a flag of trioserve config schema"),
    ):
        assert main(["config", *words]) == 2
        assert problem in capsys.readouterr().err
