"""Reads messages in a terminal: with editing, history and completion where it has the means."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trioserve.cli.terminal.chat import COMMANDS, Read, TerminalChat
from trioserve.config.files import user_state
from trioserve.errors import ConfigError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_FENCE = '"""'

#: Bytes of the history: at this size, the older half goes.
_MAX_HISTORY = 2**20

#: A likely secret: a key of a well-known form, or a value whose name suggests one.
_SECRET = re.compile(
    r"\b(sk|hf|ghp|gho|glpat|xox[abp]|AKIA|AIza)[-_A-Za-z0-9]{16,}|-----BEGIN|"
    r"\b(?i:password|passwd|secret|token|api[-_ ]?key)\s*[:=]\s*\S"
)


def is_secret(text: str) -> bool:
    """True if the history leaves a message out: it has a secret, or begins with a blank."""
    return text.startswith(" ") or _SECRET.search(text) is not None


def is_open(text: str) -> bool:
    """True if a message begins with three quotes and has no closing ones yet."""
    return text.lstrip().startswith(_FENCE) and text.count(_FENCE) == 1


def without_fence(text: str) -> str:
    """A message without the quotes around it."""
    text = text.strip()
    return text.removeprefix(_FENCE).removesuffix(_FENCE).strip() if _FENCE in text else text


def completions(chat: TerminalChat, text: str) -> Iterator[tuple[str, str, str]]:
    """Yield completions of a text: each word, the part of the text it replaces, and its help."""
    name, blank, rest = text.partition(" ")
    if not blank and text.startswith("/") and "/" not in text[1:]:
        for word, one in COMMANDS.items():
            if word.startswith(text) and one.help:
                yield word, text, one.help
    elif (command := COMMANDS.get(name)) is not None:
        typed = rest.split(" ")[-1]
        for word in command.words(chat):
            if word.startswith(typed):
                yield word, typed, ""
    last = re.split(r"\s", text)[-1]
    if last.startswith(("./", "../", "~/", "/")) and (blank or "/" in last[1:]):
        yield from _paths(last)


def _paths(typed: str) -> Iterator[tuple[str, str, str]]:
    folder, _, begin = typed.rpartition("/")
    try:
        found = sorted(Path(os.path.expanduser(folder or "/")).iterdir())
    except OSError:
        return
    for path in found:
        if path.name.startswith(begin) and (begin or not path.name.startswith(".")):
            end = "/" if path.is_dir() else ""
            yield f"{folder}/{path.name}{end}".replace(" ", "\\ "), typed, ""


# -- without prompt_toolkit


async def read_plainly() -> str | None:
    """Wait for a message where nothing can be edited: on a terminal that is not the output's."""
    lines: list[str] = []
    while not lines or is_open("\n".join(lines)):
        print("... " if lines else ">>> ", end="", flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        if not (line := sys.stdin.readline()):
            return None
        lines.append(line.rstrip("\n"))
    return without_fence("\n".join(lines))


# -- with it


@asynccontextmanager
async def reading(chat: TerminalChat) -> AsyncIterator[Read]:
    """Give what reads messages. Its thread ends when the reading is cancelled."""
    if not sys.stdout.isatty():
        yield read_plainly
        return
    session = await trio.to_thread.run_sync(_session, chat)

    async def read() -> str | None:
        prompting = _Prompting(session)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prompting.end_when_cancelled)
            with trio.CancelScope(shield=True):
                text = await trio.to_thread.run_sync(prompting.run)
            nursery.cancel_scope.cancel()
        return None if text is None else without_fence(text)

    yield read


class _Prompting:
    """One message that is typed."""

    def __init__(self, session: PromptSession[str]) -> None:
        self._session = session
        self._is_over = False

    def run(self) -> str | None:
        try:
            return self._session.prompt(pre_run=self._begin)
        except EOFError:
            return None

    def _begin(self) -> None:
        if self._is_over:
            self._exit()

    def _exit(self) -> None:
        if self._session.app.is_running and not self._session.app.is_done:
            self._session.app.exit(exception=EOFError())

    async def end_when_cancelled(self) -> None:
        """Wait to be cancelled; then the prompt ends, and the terminal is as before."""
        try:
            await trio.sleep_forever()
        finally:
            self._is_over = True
            if (loop := self._session.app.loop) is not None and loop.is_running():
                loop.call_soon_threadsafe(self._exit)


def _session(chat: TerminalChat) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion

    class Words(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterable[Completion]:
            for word, replaced, about in completions(chat, document.text_before_cursor):
                yield Completion(word, -len(replaced), display_meta=about)

    return PromptSession(
        ">>> ",
        multiline=True,
        prompt_continuation="... ",
        completer=Words(),
        complete_while_typing=False,
        complete_in_thread=True,
        enable_suspend=True,
        history=_history(chat),
        key_bindings=_keys(),
    )


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion:
            buffer.complete_state = None
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear(event: KeyPressEvent) -> None:
        from prompt_toolkit.application import run_in_terminal

        if not event.current_buffer.text:
            run_in_terminal(lambda: print("Ctrl-D or /bye leaves."))
        event.current_buffer.reset()

    return keys


def _history(chat: TerminalChat) -> History:
    """The history in a file that no other user can read; in memory where that is not possible."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            if chat.keeps_history and not is_secret(string):
                try:
                    super().store_string(string)
                except OSError:
                    chat.keeps_history = False

    try:
        path = user_state(os.environ) / "history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            if len(text := file.read()) > _MAX_HISTORY:
                file.seek(0)
                file.truncate()
                file.write(text[text.index(b"\n\n#", len(text) // 2) :])
    except (OSError, ConfigError, ValueError):
        return InMemoryHistory()
    return Kept(path)
