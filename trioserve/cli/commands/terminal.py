"""``trioserve run``: a chat with a model in the terminal."""

from __future__ import annotations

import math
import re
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import attrs
import trio

from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta
from trioserve.chat.messages import Image
from trioserve.cli.agents import Endpoint
from trioserve.cli.commands.launch import AgentServer
from trioserve.cli.options import Arguments, parse_flags
from trioserve.cli.signals import run_foreground
from trioserve.concurrency import alongside
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, TrioServeError, first_error
from trioserve.models import EXAMPLE_PROMPTS, TOY
from trioserve.remote.server import AnyServer, RemoteServer
from trioserve.server.keywords import ChatFields
from trioserve.server.stream import ChatChunk

#: The parameters that ``/set`` takes, by their names in Ollama where it has others.
_SETTINGS: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "seed": ("seed", int),
    "num_predict": ("max_tokens", int),
}

_HELP = f"""\
/help               show this
/clear              forget the conversation
/system TEXT        set the system message; without TEXT, remove it
/set NAME VALUE     set one of {", ".join(_SETTINGS)}
/bye                leave, as Ctrl-D does
\"\"\"                 begin or end a message of several lines
Ctrl-C stops an answer. The path of a PNG, JPEG, WebP or GIF file in a message sends the image.
"""

_FENCE = '"""'

#: The path of an image in a message: in quotes, or with escaped spaces, as terminals drop files.
_IMAGE = re.compile(
    r"""'([^'\n]+\.(?:png|jpe?g|webp|gif))'|"([^"\n]+\.(?:png|jpe?g|webp|gif))"|"""
    r"""((?:\\.|[^\s\\'"])+\.(?:png|jpe?g|webp|gif))(?=\s|$)""",
    re.IGNORECASE,
)


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a variable is invalid, or the server has several models and none is
            named.
        TrioServeError: the model cannot be loaded, or the server at the URL does not answer.
    """
    words, flags = [*given.words], [*given.flags]
    named = parse(flags, {}).config.model_named
    if words and named is None:
        flags += ["--model", words.pop(0)]
    prompt = " ".join(words)
    config = parse_flags(flags, given.environ).config
    if not sys.stdin.isatty():
        prompt = "\n\n".join(filter(None, [prompt, sys.stdin.read().strip()]))
        if not prompt:
            raise ConfigError("run needs a prompt, as an argument or on standard input")
    server = AgentServer(given["url"], config, flags, given.environ)
    return run_foreground(partial(_run, server, prompt))


async def _run(server: AgentServer, prompt: str) -> int:
    async with (
        server.endpoint() as endpoint,
        RemoteServer(endpoint.url, model=endpoint.model, api_key=endpoint.api_key) as model,
    ):
        chat = TerminalChat(model, sys.stdout)
        async with alongside(partial(_stop_answers, chat)):
            if not prompt:
                print(_greeting(endpoint))
                await chat.converse(input)
                return 0
            has_answer = await chat.say(prompt)
    if chat.was_stopped:
        return 128 + signal.SIGINT
    return 0 if has_answer else 1


def _greeting(endpoint: Endpoint) -> str:
    text = f"{endpoint.model}: {endpoint.context} tokens. /help lists commands."
    return f"{text}\nIt {TOY}. Try: {'; '.join(EXAMPLE_PROMPTS)}" if endpoint.is_toy else text


async def _stop_answers(chat: TerminalChat) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            chat.stop()


@attrs.define(eq=False)
class TerminalChat:
    """A conversation: sends what is typed, and writes answers as they arrive.

    `was_stopped` tells whether the last answer was.
    """

    server: AnyServer
    output: TextIO
    was_stopped: bool = False
    settings: dict[str, float] = attrs.field(factory=dict)
    system: str = ""
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    _answering: trio.CancelScope | None = None

    def stop(self) -> None:
        """Stop the answer, which frees its slot. Without one, say how to leave."""
        if self._answering is None:
            self._write("\nCtrl-D or /bye leaves.\n")
        else:
            self.was_stopped = True
            self._answering.cancel()

    async def converse(self, read: Callable[[str], str]) -> None:
        """Answer what is typed until its end.

        Args:
            read: blocks for a line, as `input` does. Being cancelled abandons its thread.
        """
        while (text := await _message(read)) is not None:
            if text.startswith("/") and not _IMAGE.match(text):
                if text.split()[0] in ("/bye", "/exit"):
                    return
                self._write(self.command(text))
            elif text:
                await self.say(text)

    def command(self, text: str) -> str:
        """Carry out a command; returns what to write."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/help" | "/?":
                return _HELP
            case "/clear":
                self.messages.clear()
                return "The conversation is forgotten.\n"
            case "/system":
                self.system = rest
                return "The system message is set.\n" if rest else "There is no system message.\n"
            case "/set":
                return self._set(rest)
        return f"There is no command {name}; /help lists them.\n"

    def _set(self, rest: str) -> str:
        name, _, text = rest.removeprefix("parameter ").partition(" ")
        if name not in _SETTINGS:
            return f"/set takes one of {', '.join(_SETTINGS)}.\n"
        field, kind = _SETTINGS[name]
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            return f"{name} must be a number, not {text!r}.\n"
        self.settings[field] = value
        return f"{name} is {value}.\n"

    async def say(self, text: str) -> bool:
        """Send a message and write the answer; returns whether there was one.

        A message that fails is taken back. An answer that is stopped stays as far as it came.
        """
        self.was_stopped = False
        self.messages.append({"role": "user", "content": _content(text)})
        answer: list[str] = []
        try:
            with trio.CancelScope() as self._answering:
                await self._stream(answer)
        except (TrioServeError, BaseExceptionGroup) as failure:
            self.messages.pop()
            error = first_error(failure)
            if not isinstance(error, TrioServeError):
                raise error from None
            self._write("\n" * bool(answer) + f"{error.message}\n")
            return False
        finally:
            self._answering = None
        self.messages.append({"role": "assistant", "content": "".join(answer)})
        self._write("\n")
        return True

    async def _stream(self, answer: list[str]) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        settings = cast(ChatFields, self.settings)
        is_thinking = False
        async with self.server.stream_chat([*system, *self.messages], **settings) as stream:
            async for chunk in stream:
                for delta in chunk.deltas if isinstance(chunk, ChatChunk) else ():
                    is_thinking = self._show(delta, answer, is_thinking=is_thinking)

    def _show(self, delta: Delta, answer: list[str], *, is_thinking: bool) -> bool:
        """Write a part of the answer; returns whether the model is thinking."""
        if isinstance(delta, ReasoningDelta) and self.output.isatty():
            self._write(delta.text if is_thinking else f"\x1b[2m{delta.text}")
            return True
        if isinstance(delta, ContentDelta):
            self._write(f"\x1b[0m\n\n{delta.text}" if is_thinking else delta.text)
            answer.append(delta.text)
            return False
        return is_thinking

    def _write(self, text: str) -> None:
        self.output.write(text)
        self.output.flush()


async def _message(read: Callable[[str], str]) -> str | None:
    """Wait for a message, of several lines between quotes; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = await trio.to_thread.run_sync(
                read, "... " if lines else ">>> ", abandon_on_cancel=True
            )
        except EOFError:
            return None
        if not lines and not line.startswith(_FENCE):
            return line.strip()
        lines.append(line if lines else line[len(_FENCE) :])
        if lines[-1].rstrip().endswith(_FENCE):
            return "\n".join(lines).rstrip()[: -len(_FENCE)].strip()


def _content(text: str) -> str | list[Any]:
    """The content of a message: the text, and the images whose paths are in it."""
    images: list[Any] = []

    def take(found: re.Match[str]) -> str:
        path = Path(found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])).expanduser()
        if not path.is_file():
            return found[0]
        images.append(Image(path))
        return ""

    rest = _IMAGE.sub(take, text).strip()
    return [*images, {"type": "text", "text": rest}] if images else text
