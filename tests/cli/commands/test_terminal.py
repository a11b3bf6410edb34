"""`trioserve run`: a chat in the terminal."""

from __future__ import annotations

import io
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.compacted import Model
from tests.support.http_server import serving_script, slots_in_use
from tests.support.scripts import answering, endless
from tests.support.waiting import patiently, until
from trioserve.chat.compaction import PREFACE
from trioserve.chat.messages import Image
from trioserve.cli.commands.terminal import settings_of
from trioserve.cli.main import main
from trioserve.cli.terminal.chat import Read, TerminalChat
from trioserve.cli.terminal.prompt import completions, is_open, is_secret, without_fence
from trioserve.cli.terminal.turns import Turn, file_of, typed as typed_turn
from trioserve.config.parse import parse
from trioserve.errors import InvalidMediaError
from trioserve.remote.answers import Model as Listed
from trioserve.remote.client import connected_to
from trioserve.testing import ScriptedBackend


@asynccontextmanager
async def chatting(
    backend: ScriptedBackend | None = None,
) -> AsyncIterator[tuple[TerminalChat, io.StringIO, Any]]:
    output = io.StringIO()
    async with (
        serving_script(backend) as (url, server),
        connected_to(url) as client,
    ):
        yield TerminalChat(client, "scripted", output), output, server


def typed(*lines: str) -> Read:
    left = list(lines)

    async def read() -> str | None:
        await trio.lowlevel.checkpoint()
        return left.pop(0) if left else None

    return read


async def test_an_answer_is_written_and_remembered() -> None:
    async with chatting() as (chat, output, _):
        await chat.converse(typed())
        assert output.getvalue() == ""
        await chat.converse(typed("/set num_predict 4", "Hello", "", "/bye", "not sent"))
        assert [one.role for one in chat.messages] == ["user", "assistant"]
        answer = chat.messages[1].content
        assert answer
        assert output.getvalue() == f"max_tokens is 4.\n{answer}\n"


async def test_a_message_that_fails_is_taken_back() -> None:
    async with chatting() as (chat, output, _):
        chat.settings["top_p"] = "many"
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
        assert chat.messages[1].content == output.getvalue().removesuffix("\n")
        chat.stop()
        assert output.getvalue().endswith("Ctrl-D or /bye leaves.\n")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("/help", "/system TEXT"),
        ("/clear", "forgotten"),
        ("/system Be brief.", "is set"),
        ("/system", "no system message"),
        ("/set", "/set takes one of think, nothink, verbose,"),
        ("/set seed x", "seed must be a number, not 'x'"),
        ("/set temperature nan", "'temperature' must be"),
        ("/set parameter top_k 3", "top_k is 3"),
        ("/set top_k", "top_k is the default"),
        ("/set tempratur 1", "no setting tempratur; did you mean temperature?"),
        ("/set think maybe", "takes one of on, off, low,"),
        ("/set think high", "Thinking is high"),
        ("/set format json", "Answers are JSON"),
        ("/set format {", "takes json, text, or a JSON Schema"),
        ("/set verbose", "All speeds"),
        ("/set nohistory", "not kept"),
        ("/set system Be brief.", "is set"),
        ("/show", "model     scripted"),
        ("/model", "This is scripted. The server has scripted."),
        ("/model other", "The server has no model other; it has scripted."),
        ("/model script", "scripted answers from here on, with "),
        ("/save", "takes a name"),
        ("/load", "takes the name of a saved chat, or a path; there are none"),
        ("/load none", "none.json cannot be read: No such file"),
        ("/save /nowhere/x.json", "/nowhere/x.json cannot be written"),
        ("/nonsense", "no command /nonsense; /help lists them."),
        ("/clera", "no command /clera; did you mean /clear?"),
    ],
)
async def test_commands(
    text: str, written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with chatting() as (chat, _, _):
        assert written in await chat.command(text)


async def test_what_commands_set() -> None:
    async with chatting() as (chat, _, _):
        chat.messages.append(Turn("user", "x"))
        for text in ("/clear", "/system Be brief.", "/set num_predict 3", "/set think low"):
            await chat.command(text)
        thinking = {"enable_thinking": True, "reasoning_effort": "low"}
        assert (chat.messages, chat.system) == ([], "Be brief.")
        assert chat.settings == {"max_tokens": 3, **thinking}
        await chat.command("/set nothink")
        assert chat.settings == {"max_tokens": 3, "enable_thinking": False}


async def test_a_chat_is_saved_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with chatting() as (chat, _, _):
        turns = [Turn("user", "What is it?", ["/a/b.png"]), Turn("assistant", "A cat.")]
        chat.messages, chat.system = [*turns], "Be brief."
        chat.settings = {"temperature": 0.5, "response_format": {"type": "json_object"}}
        before = dict(chat.settings)
        assert "Saved 2 messages" in await chat.command("/save cats")
        assert stat.S_IMODE(file_of("cats").stat().st_mode) == 0o600
        chat.messages, chat.system, chat.settings = [], "", {}
        assert await chat.command("/load cats") == "Loaded 2 messages."
        assert (chat.messages, chat.system, chat.settings) == (turns, "Be brief.", before)
        other = file_of("cats").read_text().replace('"scripted"', '"gone"')
        file_of("cats").write_text(other)
        assert await chat.command("/load cats") == (
            "Loaded 2 messages. scripted answers: gone is not here."
        )
        file_of("cats").write_text("[1]")
        assert "cats.json is no saved chat" in await chat.command("/load cats")


async def test_speeds_are_told_in_as_much_detail_as_is_asked_for() -> None:
    async with chatting() as (chat, output, _):
        chat.aside, chat.settings = io.StringIO(), {"max_tokens": 4}
        for detail, pattern in (
            (0, ""),
            (1, r"4 tokens, [\d.]+ tokens/s, first after [\d.]+ s\n"),
            (2, r"prompt  \d+ tokens, \d+ of them cached, .*\nanswer  4 tokens, .*\nfirst .* s\n"),
        ):
            chat.shows = detail
            chat.aside.seek(0)
            chat.aside.truncate()
            assert await chat.say("Hello")
            assert re.fullmatch(pattern, chat.aside.getvalue())
        assert "tokens/s" not in output.getvalue()


async def test_flags_of_sampling_go_with_the_request() -> None:
    parsed = parse(["-n", "3", "--temp", "0", "-j", "{}", "-rea", "off", "--top-k", "1"], {})
    assert settings_of(parsed.options, parsed.config) == {
        "max_tokens": 3, "temperature": 0.0, "json_schema": {}, "enable_thinking": False,
        "top_k": 1,
    }  # fmt: skip
    async with chatting() as (chat, output, _):
        chat.settings = settings_of(["n_predict"], parsed.config)
        chat.shows = 1
        await chat.say("Hello")
        assert "\n3 tokens, " in output.getvalue()


def test_images_by_path(tmp_path: Path) -> None:
    for name in ("a.png", "b c.JPG"):
        (tmp_path / name).write_bytes(b"")
    first, second = f"{tmp_path}/a.png", f"{tmp_path}/b c.JPG"
    turn = typed_turn(f"What is '{second}' and {first}?")
    assert turn == Turn("user", "What is  and ?", [second, first])
    assert turn.message()["content"] == [
        Image(second), Image(first), {"type": "text", "text": "What is  and ?"},
    ]  # fmt: skip
    assert typed_turn(f"{tmp_path}/b\\ c.JPG") == Turn("user", "", [second])
    for text in ("no such.png", "see https://example.com/a.png", " two\n lines "):
        assert typed_turn(text) == Turn("user", text)
    for name in (f"{tmp_path}/none.png", "./none.jpg", "'/a b.gif'", "~/none.webp"):
        with pytest.raises(InvalidMediaError, match="There is no file"):
            typed_turn(f"What is {name}")


async def test_an_image_is_named_and_one_that_is_missing_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    async with chatting() as (chat, output, _):
        assert not await chat.say(f"What is {tmp_path}/none.png")
        assert output.getvalue() == (
            f"There is no file {tmp_path}/none.png, so the message was not sent.\n"
        )
        assert not await chat.say(f"What is {tmp_path}/a.png")  # the model has no eyes
        assert f"Added image {tmp_path}/a.png\n" in output.getvalue()
        assert chat.messages == []


# -- what is typed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/s", ["/system", "/set", "/show", "/save"]),
        ("/set th", ["think"]),
        ("/set temp", ["temperature"]),
        ("/model a", ["a-model"]),
        ("/model ", ["a-model", "b-model"]),
        ("/load c", ["cats"]),
        ("What is {}/a", ["{}/a\\ b.png"]),
        ("{}/su", ["{}/sub/"]),
        ("What is it", []),
        ("/clear x", []),
    ],
)
async def test_completions(
    text: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "a b.png").touch()
    async with chatting() as (chat, _, _):
        chat.models = [Listed("a-model"), Listed("b-model")]
        await chat.command("/save cats")
        found = [word for word, _, _ in completions(chat, text.format(tmp_path))]
        assert found == [word.format(tmp_path) for word in words]


def test_quotes_make_lines() -> None:
    assert is_open('"""one\ntwo') and not is_open('"""one\ntwo"""') and not is_open("one")
    assert without_fence('"""one\n\ntwo"""') == "one\n\ntwo"
    assert without_fence(" a ") == "a"


def test_secrets_are_not_kept() -> None:
    for text in (" hidden", "use sk-abcdefghij0123456789", "my password: x", "API_KEY=1"):
        assert is_secret(text)
    for text in ("the secret of life", "a token is a word", "skills"):
        assert not is_secret(text)


def test_without_a_prompt(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(["run", "m.gguf"]) == 2
    assert "run needs a prompt" in capsys.readouterr().err


async def test_a_conversation_continues_with_a_summary() -> None:
    model = Model()
    async with chatting(answering(model, n_ctx=8192)) as (chat, output, _):
        chat.system = "Be brief."
        lines = (f"fact-{name} {'x' * 2500}" for name in ("one", "two"))
        await chat.converse(typed("/compact", *lines, "/compact", "And now?"))
    assert output.getvalue().count("The conversation continues with this summary.") == 1
    assert "There is nothing to summarize." in output.getvalue()
    summary, _, *rest = chat.messages
    assert summary.content == f"{PREFACE}Summary: fact-one, fact-two"
    assert [one.role for one in rest] == ["user", "assistant"]
    assert model.prompts[-1].count("fact-one") == 1
    assert "Be brief." in model.prompts[-1] and "And now?" in model.prompts[-1]
