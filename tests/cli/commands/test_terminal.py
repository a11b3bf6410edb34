"""`trioserve run`: a chat in the terminal."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.http_server import serving_script, slots_in_use
from tests.support.scripts import endless
from tests.support.waiting import patiently, until
from trioserve.chat.messages import Image
from trioserve.cli.commands.terminal import TerminalChat, _content
from trioserve.cli.main import main
from trioserve.remote.server import RemoteServer
from trioserve.testing import ScriptedBackend


@asynccontextmanager
async def chatting(
    backend: ScriptedBackend | None = None,
) -> AsyncIterator[tuple[TerminalChat, io.StringIO, Any]]:
    output = io.StringIO()
    async with (
        serving_script(backend) as (url, server),
        RemoteServer(url, model="scripted") as model,
    ):
        yield TerminalChat(model, output), output, server


def typed(*lines: str) -> Callable[[str], str]:
    left = list(lines)

    def read(_prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read


async def test_an_answer_is_written_and_remembered() -> None:
    async with chatting() as (chat, output, _):
        await chat.converse(typed("/set num_predict 4", "Hello", "", "/bye", "not sent"))
        assert [one["role"] for one in chat.messages] == ["user", "assistant"]
        answer = chat.messages[1]["content"]
        assert answer
        assert output.getvalue() == f"num_predict is 4.\n{answer}\n"


async def test_the_end_of_the_input_ends_the_chat() -> None:
    async with chatting() as (chat, output, _):
        await chat.converse(typed())
        assert output.getvalue() == ""


async def test_a_message_of_several_lines() -> None:
    async with chatting() as (chat, _, _):
        chat.settings["max_tokens"] = 1
        await chat.converse(typed('"""one', "", 'two"""', '"""three"""'))
        assert [one["content"] for one in chat.messages[::2]] == ["one\n\ntwo", "three"]


async def test_a_message_that_fails_is_taken_back() -> None:
    async with chatting() as (chat, output, _):
        chat.settings["top_p"] = "many"  # type: ignore[assignment]
        assert not await chat.say("Hello")
        assert chat.messages == []
        assert "top_p" in output.getvalue()


async def test_stopping_keeps_what_was_said() -> None:
    async with chatting(endless()) as (chat, output, service):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chat.say, "Hello")
            await until(lambda: bool(output.getvalue()))
            chat.stop()
        assert chat.was_stopped
        with patiently():
            while await slots_in_use(service):
                await trio.sleep(0.01)
        assert chat.messages[1]["content"] == output.getvalue().removesuffix("\n")
        chat.stop()
        assert output.getvalue().endswith("Ctrl-D or /bye leaves.\n")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("/help", "/system TEXT"),
        ("/clear", "forgotten"),
        ("/system Be brief.", "is set"),
        ("/system", "no system message"),
        ("/set", "/set takes one of temperature"),
        ("/set seed x", "seed must be a number, not 'x'"),
        ("/set temperature nan", "must be a number"),
        ("/set parameter top_k 3", "top_k is 3"),
        ("/nonsense", "no command /nonsense"),
    ],
)
async def test_commands(text: str, written: str) -> None:
    async with chatting() as (chat, _, _):
        assert written in chat.command(text)


async def test_what_commands_set() -> None:
    async with chatting() as (chat, _, _):
        chat.messages.append({"role": "user", "content": "x"})
        for text in ("/clear", "/system Be brief.", "/set num_predict 3"):
            chat.command(text)
        assert (chat.messages, chat.system, chat.settings) == ([], "Be brief.", {"max_tokens": 3})


def test_images_by_path(tmp_path: Path) -> None:
    for name in ("a.png", "b c.JPG"):
        (tmp_path / name).write_bytes(b"")
    text = f"What is '{tmp_path}/b c.JPG' and {tmp_path}/a.png"
    assert _content(text) == [
        Image(tmp_path / "b c.JPG"),
        Image(tmp_path / "a.png"),
        {"type": "text", "text": "What is  and"},
    ]
    escaped = f"{tmp_path}/b\\ c.JPG"
    assert _content(escaped) == [Image(tmp_path / "b c.JPG"), {"type": "text", "text": ""}]
    assert _content("no such.png") == "no such.png"


def test_without_a_prompt(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(["run", "m.gguf"]) == 2
    assert "run needs a prompt" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "beginning"), [("help", "usage: "), ("version", "trioserve ")])
def test_help_and_version_as_words(word: str, beginning: str, capsys: Any) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out.startswith(beginning)
