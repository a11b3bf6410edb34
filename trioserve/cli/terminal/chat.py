"""`TerminalChat`: a conversation in the terminal. `COMMANDS` may be typed after a slash."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TextIO, cast

import attrs
import trio

from trioserve.chat.deltas import ContentDelta, ReasoningDelta
from trioserve.cli.local_server import MAX_BYTES, named, names_of, props_of
from trioserve.cli.output import DIM, RED, has_colors, styled, table
from trioserve.cli.terminal import turns
from trioserve.cli.terminal.turns import Turn
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError, TrioServeError, first_error
from trioserve.remote.answers import Model, Models
from trioserve.remote.client import ServerClient
from trioserve.remote.server import Compacted, RemoteServer
from trioserve.server.keywords import ChatFields
from trioserve.server.stream import ChatChunk
from trioserve.types import SamplingParams, Timings
from trioserve.types.params import changed
from trioserve.units import duration_text, rate_text

#: Waits for what is typed; None at its end.
Read = Callable[[], Awaitable[str | None]]

#: Parameters of answers by their names in a request, with those of Ollama.
_KINDS: Mapping[str, Callable[[str], Any]] = {
    one.name: {"int": int, "float": float}[str(one.type)]
    for one in attrs.fields(SamplingParams)
    if str(one.type) in ("int", "float")
} | {"max_tokens": int}
_OLLAMA = {"num_predict": "max_tokens"}
PARAMETERS = (*_KINDS, *_OLLAMA)

_LEVELS = ("on", "off", "low", "medium", "high")


@attrs.define(eq=False)
class TerminalChat:
    """A conversation: sends what is typed, and writes answers as they arrive.

    Args:
        client: of the server, as long as the chat lasts.
        model: that answers.
        output: where answers go.
        aside: where the rest goes; by default to the answers.
        context: tokens that a request may have; 0 if it is not known.
        settings: fields of each request.
        shows: how much of the speed of answers: 0 nothing, 1 a line, 2 all.

    Attributes:
        was_stopped: whether the last answer was.
        models: those of the server, as it listed them last.
        keeps_history: whether what is typed is kept for the next chat.
    """

    client: ServerClient
    model: str
    output: TextIO
    aside: TextIO = attrs.field(default=attrs.Factory(lambda chat: chat.output, takes_self=True))
    context: int = 0
    settings: dict[str, Any] = attrs.field(factory=dict)
    shows: int = 0
    was_stopped: bool = False
    system: str = ""
    messages: list[Turn] = attrs.field(factory=list)
    models: list[Model] = attrs.field(factory=list)
    keeps_history: bool = True
    _answering: trio.CancelScope | None = None

    def stop(self) -> None:
        """Stop the answer, which frees its slot. Without one, say how to leave."""
        if self._answering is None:
            self.tell("\nCtrl-D or /bye leaves.")
        else:
            self.was_stopped = True
            self._answering.cancel()

    async def converse(self, read: Read) -> None:
        """Answer what is typed until its end."""
        while (text := await read()) is not None:
            if text.startswith("/") and not turns.begins_with_path(text):
                if text.split()[0] in ("/bye", "/exit", "/quit"):
                    return
                self.tell(await self.command(text))
            elif text:
                await self.say(text)

    async def command(self, text: str) -> str:
        """Carry out a command; returns what to write."""
        name, _, rest = text.partition(" ")
        if (command := COMMANDS.get(name)) is None:
            hint = did_you_mean(name, COMMANDS) or "; /help lists them."
            return f"There is no command {name}{hint}"
        try:
            return await command.run(self, rest.strip())
        except TrioServeError as error:
            return error.message

    async def say(self, text: str) -> bool:
        """Send a message and write the answer; returns whether there was one.

        A message that fails is taken back. An answer that is stopped stays as far as it came.
        """
        self.was_stopped = False
        answer: list[str] = []
        n_before = len(self.messages)
        try:
            turn = turns.typed(text)
            for path in turn.images:
                self.tell(f"Added image {path}")
            self.messages.append(turn)
            with trio.CancelScope() as self._answering:
                await self._stream(answer)
        except (TrioServeError, BaseExceptionGroup) as failure:
            del self.messages[n_before:]
            error = first_error(failure)
            if not isinstance(error, TrioServeError):
                raise error from None
            self.tell(error.message, RED)
            return False
        finally:
            self._answering = None
        self.messages.append(Turn("assistant", "".join(answer)))
        return True

    async def compact(self) -> str:
        """Have the model sum up the conversation; only its last messages stay as they are."""
        server, system = RemoteServer.over(self.client, self.model), bool(self.system)
        found: Compacted | None = None
        try:
            with trio.CancelScope() as self._answering:
                found = await server.compact(self._sent())
        finally:
            self._answering = None
        if found is None:
            return "The conversation stays as it is."
        n_kept = len(found.messages) - 1 - system
        kept = self.messages[len(self.messages) - n_kept :]
        self.messages = [Turn("user", found.messages[system]["content"]), *kept]
        return f"{found.summary}\n\nThe conversation continues with this summary."

    def _sent(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(one.message() for one in self.messages)]

    async def _stream(self, answer: list[str]) -> None:
        is_thinking, began, first = False, trio.current_time(), 0.0
        server = RemoteServer.over(self.client, self.model)
        settings = cast(ChatFields, self.settings)
        try:
            async with server.stream_chat(self._sent(), **settings) as stream:
                async for chunk in stream:
                    first = first or trio.current_time() - began
                    is_thinking = self._show(chunk, answer, is_thinking=is_thinking)
        finally:
            ends = "\x1b[0m" if is_thinking and has_colors(self.output) else ""
            self.write(f"{ends}\n" if answer or is_thinking else "")
        if stream.finished is not None:
            self.tell(speeds(stream.finished.timings, first, self.shows), DIM)

    def _show(self, chunk: object, answer: list[str], *, is_thinking: bool) -> bool:
        """Write a part of the answer; returns whether the model is thinking."""
        dim, plain = ("\x1b[2m", "\x1b[0m") if has_colors(self.output) else ("", "")
        for delta in chunk.deltas if isinstance(chunk, ChatChunk) else ():
            if isinstance(delta, ReasoningDelta) and self.output.isatty():
                self.write(delta.text if is_thinking else dim + delta.text)
                is_thinking = True
            elif isinstance(delta, ContentDelta):
                self.write(f"{plain}\n\n{delta.text}" if is_thinking else delta.text)
                answer.append(delta.text)
                is_thinking = False
        return is_thinking

    def tell(self, text: str, code: str = "") -> None:
        if text:
            self.aside.write(f"{styled(text, code, self.aside) if code else text}\n")
            self.aside.flush()

    def write(self, text: str) -> None:
        self.output.write(text)
        self.output.flush()

    async def list_models(self) -> list[Model]:
        """Ask the server for its models. Raises TrioServeError."""
        self.models = (await self.client.ask("/v1/models", form=Models, most=MAX_BYTES)).data
        return self.models

    async def use(self, name: str) -> None:
        """Continue with another model, which the server loads. Raises TrioServeError."""
        models = await self.list_models()
        if (found := named(models, name)) is None:
            raise ConfigError(f"The server has no model {name}; it has {names_of(models)}.")
        props = await props_of(self.client, found)
        self.model, self.context = found, props.default_generation_settings.n_ctx


def speeds(timings: Timings, first: float, detail: int) -> str:
    """Tell the speed of an answer, with `first` seconds to its first token; `detail` as `shows`."""
    if not detail or not timings.predicted_n:
        return ""
    seconds = timings.predicted_ms / 1000
    answer = f"{timings.predicted_n} tokens"
    if seconds:  # not of a server that tells no times
        answer += f", {rate_text(timings.predicted_n / seconds, 'tokens')}"
    if detail == 1:
        return f"{answer}, first after {duration_text(first)}"
    prompt = f"{timings.prompt_n + timings.cache_n} tokens, {timings.cache_n} of them cached"
    if timings.prompt_ms:
        rate = rate_text(timings.prompt_n / timings.prompt_ms * 1000, "tokens")
        prompt += f", {duration_text(timings.prompt_ms / 1000)}, {rate}"
    if seconds:
        answer += f", {duration_text(seconds)}"
    return f"prompt  {prompt}\nanswer  {answer}\nfirst token after {duration_text(first)}"


# -- commands


@attrs.frozen
class ChatCommand:
    """A command, which users type after a slash.

    Attributes:
        usage: its arguments.
        help: what it does.
        run: does it, with the rest of the line; returns what to write.
        words: what may follow, for completion.
    """

    usage: str
    help: str
    run: Callable[[TerminalChat, str], Awaitable[str]]
    words: Callable[[TerminalChat], Iterable[str]] = lambda chat: ()


async def _help(_chat: TerminalChat, _rest: str) -> str:
    rows = [(f"{name} {one.usage}".rstrip(), one.help) for name, one in COMMANDS.items()]
    return table([row for row in rows if row[1]]) + _KEYS


async def _clear(chat: TerminalChat, _rest: str) -> str:
    chat.messages.clear()
    return "The conversation is forgotten."


async def _model(chat: TerminalChat, rest: str) -> str:
    if not rest:
        names = names_of(await chat.list_models())
        return f"This is {chat.model}. The server has {names}."
    await chat.use(rest)
    return f"{chat.model} answers from here on, with {chat.context} tokens."


async def _save(chat: TerminalChat, rest: str) -> str:
    if not rest:
        raise ConfigError("/save takes a name, or the path of a file.")
    path = turns.file_of(rest)
    saved = turns.Saved(chat.model, chat.messages, chat.system, chat.settings)
    await trio.to_thread.run_sync(turns.save, saved, path)
    return f"Saved {len(chat.messages)} messages to {path}."


async def _load(chat: TerminalChat, rest: str) -> str:
    if not rest:
        names = ", ".join(turns.saved_names()) or "none"
        raise ConfigError(f"/load takes the name of a saved chat, or a path; there are {names}.")
    saved = await trio.to_thread.run_sync(turns.load, turns.file_of(rest))
    note = ""
    if saved.model != chat.model:
        try:
            await chat.use(saved.model)
        except TrioServeError:
            note = f" {chat.model} answers: {saved.model} is not here."
    chat.messages, chat.system, chat.settings = saved.messages, saved.system, saved.parameters
    return f"Loaded {len(saved.messages)} messages.{note}"


async def _show(chat: TerminalChat, _rest: str) -> str:
    rows = {
        "model": chat.model + (f", {chat.context} tokens" if chat.context else ""),
        "messages": str(len(chat.messages)),
        "system": chat.system or "none",
        **{name: str(value) for name, value in chat.settings.items()},
    }
    return table([*rows.items()]).rstrip()


async def _set(chat: TerminalChat, rest: str) -> str:
    name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
    if (setting := SETTINGS.get(name)) is not None:
        return setting(chat, value.strip())
    if (name := _OLLAMA.get(name, name)) in _KINDS:
        return _set_parameter(chat, name, value.strip())
    hint = did_you_mean(name, (*SETTINGS, *PARAMETERS)) if name else ""
    words = f"{', '.join(SETTINGS)}, or a parameter: {', '.join(PARAMETERS)}"
    return f"There is no setting {name}{hint}" if hint else f"/set takes one of {words}."


def _set_parameter(chat: TerminalChat, name: str, text: str) -> str:
    if not text:
        chat.settings.pop(name, None)
        return f"{name} is the default."
    try:
        value = _KINDS[name](text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, not {text!r}.") from None
    if name in attrs.fields_dict(SamplingParams):
        changed(SamplingParams(), {name: value})
    chat.settings[name] = value
    return f"{name} is {value}."


def _think(chat: TerminalChat, value: str) -> str:
    level = value or "on"
    if level not in _LEVELS:
        raise ConfigError(f"/set think takes one of {', '.join(_LEVELS)}.")
    chat.settings.pop("reasoning_effort", None)
    chat.settings["enable_thinking"] = level != "off"
    if level not in ("on", "off"):
        chat.settings["reasoning_effort"] = level
    return f"Thinking is {level}, if the model can."


def _format(chat: TerminalChat, value: str) -> str:
    chat.settings.pop("response_format", None)
    if value in ("", "text"):
        return "Answers are text."
    form: dict[str, Any] = {"type": "json_object"}
    if value != "json":
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError("/set format takes json, text, or a JSON Schema.") from None
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    chat.settings["response_format"] = form
    return "Answers are JSON."


def _setter(field: str, value: object, text: str) -> Callable[[TerminalChat, str], str]:
    """Make a setting without a value, which sets a field of the chat."""

    def put(chat: TerminalChat, _: str) -> str:
        setattr(chat, field, value)
        return text

    return put


def _set_system(chat: TerminalChat, value: str) -> str:
    chat.system = value
    return "The system message is set." if value else "There is no system message."


#: The settings that ``/set`` takes besides parameters, with Ollama's names for those it has.
SETTINGS: Mapping[str, Callable[[TerminalChat, str], str]] = {
    "think": _think,
    "nothink": lambda chat, _: _think(chat, "off"),
    "verbose": _setter("shows", 2, "All speeds are shown."),
    "quiet": _setter("shows", 0, "No speeds are shown."),
    "format": _format,
    "noformat": lambda chat, _: _format(chat, ""),
    "system": _set_system,
    "history": _setter("keeps_history", True, "What you type is kept for the next chat."),
    "nohistory": _setter("keeps_history", False, "What you type is not kept."),
}

_KEYS = """\
Alt-Enter, or \"\"\" around the message, makes lines; Tab completes commands and paths; Ctrl-C stops
an answer. The path of a PNG, JPEG, WebP or GIF file in a message sends the image."""

#: All of them; the ones without help are other words for these.
COMMANDS: Mapping[str, ChatCommand] = {
    "/help": ChatCommand("", "show this", _help),
    "/?": ChatCommand("", "", _help),
    "/clear": ChatCommand("", "forget the conversation", _clear),
    "/compact": ChatCommand("", "continue with a summary of the conversation",
                            lambda chat, _: chat.compact()),
    "/system": ChatCommand("TEXT", "set the system message; without TEXT, remove it",
                           lambda chat, rest: _set(chat, f"system {rest}")),
    "/set": ChatCommand(
        "NAME VALUE",
        "think on, verbose, format json, system TEXT, nohistory, temperature 0.2, ...",
        _set,
        lambda chat: (*SETTINGS, "parameter", *PARAMETERS),
    ),
    "/show": ChatCommand("", "show the model and what is set", _show),
    "/model": ChatCommand(
        "NAME", "continue with another model of the server; without NAME, list them", _model,
        lambda chat: [one.id for one in chat.models],
    ),
    "/save": ChatCommand("NAME", "save the conversation, by a name or the path of a file", _save,
                         lambda chat: turns.saved_names()),
    "/load": ChatCommand("NAME", "continue a saved conversation", _load,
                         lambda chat: turns.saved_names()),
    "/bye": ChatCommand("", "leave, as Ctrl-D does", _help),
    "/exit": ChatCommand("", "", _help),
    "/quit": ChatCommand("", "", _help),
}  # fmt: skip
