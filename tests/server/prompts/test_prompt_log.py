"""Prompts as files, and control tokens in the output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients import client_of
from tests.support.scripts import HI, answering
from trioserve.errors import ConfigError
from trioserve.server.prompts.text import PromptLog
from trioserve.testing.vocab import byte_vocab


async def test_each_prompt_is_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    async with client_of(answering("Hello"), log_prompts_dir=str(folder)) as client:
        await client.post("/completion", json={"prompt": "grüße"})
        await client.post("/v1/chat/completions", json={"messages": HI})
        chat = (await client.post("/apply-template", json={"messages": HI})).json()["prompt"]
    written = {path.read_text() for path in folder.iterdir()}
    assert written == {"grüße", chat}
    assert all(path.suffix == ".txt" for path in folder.iterdir())


async def test_a_prompt_that_cannot_be_written_is_answered(tmp_path: Path) -> None:
    async with client_of(answering("Hello"), log_prompts_dir=str(tmp_path / "a")) as client:
        (tmp_path / "a").rmdir()
        answer = await client.post("/completion", json={"prompt": "a"})
    assert answer.json()["content"] == "Hello"


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"log_prompts_dir: .*file/a cannot be made"):
        PromptLog(str(tmp_path / "file" / "a"), byte_vocab)


async def test_control_tokens_have_their_names() -> None:
    async with client_of(answering("Hello"), special=True) as client:
        answer = await client.post("/completion", json={"prompt": "a"})
    assert answer.json()["content"] == "Hello<eos>"
