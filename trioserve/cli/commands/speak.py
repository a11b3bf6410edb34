"""``trioserve speak``: a text as sound, in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from trioserve.cli.commands.launch import AgentServer
from trioserve.cli.local_server import client_of
from trioserve.cli.options import Arguments
from trioserve.cli.signals import run_until_signal
from trioserve.errors import ConfigError
from trioserve.media.encode import with_lengths

#: Stands for standard input and standard output.
_STANDARD = "-"

#: Bytes in which the head of a WAV file is.
_HEAD = 256

#: The formats of sound, by the endings of files.
_FORMATS: Mapping[str, str] = {
    ".aac": "aac",
    ".flac": "flac",
    ".mp3": "mp3",
    ".ogg": "opus",
    ".opus": "opus",
    ".pcm": "pcm",
    ".wav": "wav",
}


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a file is invalid, or there is no text.
        TrioServeError: the server does not start, or does not speak.
    """
    target: Path | None = given["output"]
    if target is None:
        raise ConfigError("name a file, such as trioserve speak 'Hello' -o hello.mp3")
    form = given["format"] or _format_of(target)
    server = AgentServer(
        given["url"],
        given.parsed().config,
        given.flags,
        given.environ,
        own=("tts",),
        may_be_socket=True,
    )
    body = {"input": _text(given), "response_format": form, "voice": given["voice"]}
    for name in ("speed", "language"):
        if given[name] is not None:
            body[name] = given[name]
    if str(target) == _STANDARD and sys.stdout.isatty():
        raise ConfigError("-o: standard output is a terminal, which plays no sound")
    return run_until_signal(partial(_speak, server, body, target))


def _text(given: Arguments) -> str:
    """The text to speak: the words, or what is on standard input. Raises ConfigError."""
    text = " ".join(given.words)
    if text == _STANDARD or not (text or sys.stdin.isatty()):
        text = sys.stdin.read()
    if not text.strip():
        raise ConfigError("speak needs a text, as an argument or on standard input")
    return text


def _format_of(target: Path) -> str:
    if str(target) == _STANDARD:
        return "wav"
    try:
        return _FORMATS[target.suffix.lower()]
    except KeyError:
        raise ConfigError(
            f"-o: {target} must end with one of {', '.join(_FORMATS)}, or set --format"
        ) from None


@contextmanager
def _opened(target: Path) -> Iterator[IO[bytes]]:
    """Open the file of the sound. A plain one gets its name when it is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    if str(target) == _STANDARD:
        yield sys.stdout.buffer
        return
    is_plain = not target.exists() or target.is_file()
    path = target.with_name(f".{target.name}.{os.getpid()}.part") if is_plain else target
    try:
        with path.open("w+b" if is_plain else "wb") as file:
            yield file
            if is_plain:
                size = file.tell()
                file.seek(0)
                head = with_lengths(file.read(_HEAD), size)
                file.seek(0)
                file.write(head)
        if is_plain:
            path.replace(target)
    except OSError as error:
        raise ConfigError(f"-o: {target} cannot be written: {error.strerror}") from None
    finally:
        if is_plain:
            path.unlink(missing_ok=True)


async def _speak(server: AgentServer, body: Mapping[str, Any], target: Path) -> None:
    async with (
        server.place() as (address, model),
        client_of(address) as client,
        client.answer("/v1/audio/speech", {**body, "model": model}) as answer,
    ):
        with _opened(target) as file:
            while data := await answer.receive():
                file.write(data)
                file.flush()
