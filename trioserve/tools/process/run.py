"""`run`: a program from its start to its end, with what it writes."""

from __future__ import annotations

import codecs
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import trio

from trioserve.tools.process.process import Process, open_process

#: Bytes beyond those that are kept, after which a program that goes on writing is ended.
MAX_LOST = 64 * 2**20


@attrs.frozen(kw_only=True)
class Output:
    """How a program has ended, and what it wrote."""

    #: What it wrote to standard output, up to the limit.
    data: bytes
    #: What it wrote to standard error, unless that went to standard output.
    errors: bytes = b""
    #: As a shell has it: 128 and the number of the signal, if a signal has ended it.
    exit_code: int = 0
    timed_out: bool = False
    #: Whether it wrote more than `data` has.
    truncated: bool = False
    #: The limit for which it was ended: "processes", "memory", "output" or none.
    limit_reached: str = ""

    @property
    def text(self) -> str:
        """`data` as text. A character that the limit has cut is left out."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(self.data, final=not self.truncated)


async def run(
    argv: Sequence[str],
    *,
    timeout: float,
    max_output: int,
    on_output: Callable[[str], None] | None = None,
    stdin: bytes | Literal["held"] | None = None,
    merged: bool = True,
    **options: Any,
) -> Output:
    """Run a program to its end, or for some seconds. When cancelled, it has ended, too.

    Args:
        argv: the program and its arguments, as for `open_process`.
        timeout: seconds after which it is ended.
        max_output: bytes that are kept of what it writes. It may write more, to a limit.
        on_output: is told what is kept, piece by piece.
        stdin: what it reads; "held": nothing, but that ends only with this process, or with the
            time.
        merged: whether `Output.data` has standard error, too.
        options: others of `open_process`: `env`, `cwd`, `limits` and `fence`.

    Raises:
        ToolRuntimeError: it cannot be started.
    """
    kept = _Kept(max_output, on_output)
    errors = _Kept(max_output, None)
    exit_code = -signal.SIGKILL
    options["stderr"] = "stdout" if merged else "pipe"
    async with open_process(argv, stdin=stdin is not None, **options) as process:
        with trio.move_on_after(timeout) as scope:
            await _talk(process, stdin, kept, errors)
            if not (kept.too_much or errors.too_much):
                exit_code = await process.wait()
    kept.finish()
    return Output(
        data=bytes(kept.data),
        errors=bytes(errors.data),
        exit_code=exit_code if exit_code >= 0 else 128 - exit_code,
        timed_out=scope.cancelled_caught,
        truncated=kept.lost > 0,
        limit_reached="output" if kept.too_much or errors.too_much else process.limit_reached,
    )


async def _talk(process: Process, stdin: bytes | str | None, kept: _Kept, errors: _Kept) -> None:
    """Write what it reads, and read what it writes, until it ends or has written too much."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.wait)
        if process.stdin is not None and isinstance(stdin, bytes):
            nursery.start_soon(_feed, process.stdin, stdin)
        if process.stderr is not None:
            nursery.start_soon(errors.take, process.stderr, nursery.cancel_scope)
        await kept.take(process.stdout, nursery.cancel_scope)


class _Kept:
    """What a program has written, up to a limit."""

    def __init__(self, limit: int, on_output: Callable[[str], None] | None) -> None:
        self.data = bytearray()
        self.lost = 0
        self._room = limit
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def too_much(self) -> bool:
        return self.lost > MAX_LOST

    async def take(self, stream: trio.abc.ReceiveStream, scope: trio.CancelScope) -> None:
        """Read to the end, or cancel the scope if that is too much."""
        async for piece in stream:
            kept = piece[: self._room]
            self._room -= len(kept)
            self.lost += len(piece) - len(kept)
            self.data += kept
            self._pass_on(self._decoder.decode(kept))
            if self.too_much:
                scope.cancel()

    def finish(self) -> None:
        """Pass on what the end has of a character, unless the limit has cut it."""
        if not self.lost:
            self._pass_on(self._decoder.decode(b"", final=True))

    def _pass_on(self, text: str) -> None:
        if text and self._on_output is not None:
            self._on_output(text)


async def _feed(stream: trio.abc.SendStream, data: bytes) -> None:
    async with stream:
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError:
            return  # it does not read to the end
