"""``trioserve batch``: answers the requests of a file, and appends the answers to another one.

The command sends the lines itself, as many at once as the server has places, and writes each
answer when it comes. So it may end at any moment: what is in the output is not asked for again,
and the server has no batch that would run further.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import json
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import msgspec
import trio

from trioserve.cli.local_server import MAX_BYTES, Props, client_of, server_at
from trioserve.cli.options import Arguments
from trioserve.cli.output import note
from trioserve.cli.progress import ProgressReport
from trioserve.cli.signals import run_until_signal
from trioserve.errors import ConfigError, TrioServeError
from trioserve.remote.answers import Count, Text
from trioserve.remote.client import ServerClient, error_in, read_json, receive_all
from trioserve.whole_numbers import whole_number

#: The fields of a body that its prompt begins with, by the endpoints of lines. Lines that begin
#: alike follow one another.
_PROMPTS: Mapping[str, Sequence[str]] = {
    "/v1/chat/completions": ("model", "tools", "messages"),
    "/v1/completions": ("model", "prompt"),
    "/v1/embeddings": ("model",),
    "/v1/responses": ("model", "instructions", "tools", "input"),
}

#: Bytes of each of these fields that are compared, and of an answer at most.
_COMPARED, _MAX_ANSWER = 2**14, 2**28

#: Fields of a line that would have its answer sent, or run, in another way.
_DROPPED = ("stream", "stream_options", "background")

#: The lowest `priority` of a request.
_PRIORITY = -100

#: Statuses of a server that is busy, and those that are no answer to a line: it may have one later.
_BUSY = (429, 503)
_LATER = (403, 408, 409, *range(500, 600))

#: Seconds before a line is tried again: at first, and at most, even if the server asks for more.
_PAUSE, _MAX_PAUSE = 1.0, 60.0

#: Tries of a line that gets no answer from a server that is not busy.
_TRIES = 5

#: The beginning of a line of the output.
_BEGINNING = b'{"id"'

_MAX_PLACES = 512
_MAX_NAMED = 20  # lines that failed


class _Request(msgspec.Struct):
    """A line of the input."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    url: str
    body: dict[str, msgspec.Raw]
    method: Literal["POST"] = "POST"

    def beginning(self) -> list[bytes]:
        fields = (self.body.get(name, b"") for name in _PROMPTS.get(self.url, ()))
        return [self.url.encode(), *(bytes(each)[:_COMPARED] for each in fields)]


class _Response(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str
    response: _Response | None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class _Props(Props):
    """The properties that lines depend on. A server with several models has no `total_slots`."""

    total_slots: Count = 0
    priority_order: Text = ""


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`. Returns 1 if a line has failed.

    Raises:
        ConfigError: a flag or a file is invalid.
        TrioServeError: the server does not start, or does not answer as expected.
    """
    target = given["output"]
    if target is None or str(target) == "-":
        raise ConfigError("name two files, such as trioserve batch input.jsonl -o output.jsonl")
    config = given.parsed().config
    requests = _read(Path(given.words[0]))
    with _opened(target) as file:
        batch = Batch(requests, _answered(target, file), target, file)

        async def work() -> None:
            # A server may close a kept connection just as the next request goes out.
            async with (
                server_at(given["url"], given.flags, config, given.environ) as address,
                client_of(address, n_kept=0) as client,
            ):
                await batch.run(client, config.parallel)

        code = run_until_signal(work) if batch.left else 0
    print(batch.summary())
    if code:
        note("interrupted; the same command continues from here")
    return code or int(bool(batch.failed))


# -- the files


def _read(source: Path) -> dict[int, _Request]:
    """The requests of a file, by the numbers of their lines. Raises ConfigError."""
    try:
        lines = source.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None
    found: dict[int, _Request] = {}
    lines_of: dict[str, int] = {}
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found[n] = msgspec.json.decode(line, type=_Request)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: line {n}: {error}") from None
        if (first := lines_of.setdefault(found[n].custom_id, n)) != n:
            raise ConfigError(f"{source}: line {n}: its custom_id is that of line {first}")
    if not found:
        raise ConfigError(f"{source} is empty")
    return found


def _opened(target: Path) -> FileIO:
    """Open or make the output, for this command alone. Raises ConfigError."""
    if target.exists() and not target.is_file():
        raise ConfigError(f"{target} is not a file")
    try:
        file = FileIO(target, "a+")
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"{target} is the output of another command that runs") from None
    except OSError:
        pass  # the file system has no locks
    return file


def _answered(target: Path, file: FileIO) -> dict[str, bool]:
    """The answered lines, and those without an error. Removes a partial one. Raises ConfigError."""
    found: dict[str, bool] = {}
    line = b""
    try:
        with target.open("rb") as lines:
            for line in filter(bytes.strip, lines):
                answer = msgspec.json.decode(line, type=_Written)
                found[answer.custom_id] = answer.is_good
        if line and not line.endswith(b"\n"):
            file.write(b"\n")
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None
    except (ValueError, RecursionError):
        if line.endswith(b"\n") or not line.startswith(_BEGINNING[: len(line)]):
            problem = f"{target} has lines that are no answers; name another output"
            raise ConfigError(problem) from None
        file.truncate(file.seek(0, io.SEEK_END) - len(line))
    return found


# -- answering


@attrs.define(eq=False)
class Batch:
    """Requests by their lines, and whether the answer of the output is good, by `custom_id`."""

    requests: Mapping[int, _Request]
    answered: dict[str, bool]
    target: Path
    file: FileIO
    _given_up: set[int] = attrs.field(factory=set)
    _priority: int = _PRIORITY

    @property
    def left(self) -> list[int]:
        return [n for n, each in self.requests.items() if each.custom_id not in self.answered]

    @property
    def failed(self) -> list[int]:
        """The lines whose answer is an error, and those that have got none."""
        is_good, left = self.answered, self._given_up
        lines = self.requests.items()
        return [n for n, each in lines if n in left or not is_good.get(each.custom_id, True)]

    def summary(self) -> str:
        failed, n_left = self.failed, len(self.left) - len(self._given_up)
        n_good = len(self.requests) - len(failed) - n_left
        text = f"{self.target}: {n_good} answers, {len(failed)} errors"
        if n_left:
            text += f", {n_left} lines without an answer"
        if failed:
            more = f" and {len(failed) - _MAX_NAMED} more" if len(failed) > _MAX_NAMED else ""
            text += f"; failed: line {', '.join(map(str, failed[:_MAX_NAMED]))}{more}"
        return text

    async def run(self, client: ServerClient, n_slots: int) -> None:
        """Answer the lines that have no answer. Being cancelled loses none that has come.

        `n_slots` is for a server that does not tell how many it has.

        Raises:
            ConfigError: the output cannot be written.
            TrioServeError: the server does not answer as expected.
        """
        props = await client.ask("/props", form=_Props, most=MAX_BYTES)
        if props.priority_order == "lower-first":
            self._priority = -_PRIORITY
        left = sorted(self.left, key=lambda n: self.requests[n].beginning())
        lines, n_done = iter(left), 0

        async def work() -> None:
            nonlocal n_done
            for n in lines:
                await self._answer(client, n)
                n_done += 1
                progress.tell("Answering", n_done, len(left), "lines")

        with ProgressReport(sys.stderr) as progress:
            progress.tell("Answering", 0, len(left), "lines")
            async with trio.open_nursery() as nursery:
                # As many lines wait as run: those that begin together are computed together.
                for _ in range(min(2 * (props.total_slots or n_slots), _MAX_PLACES, len(left))):
                    nursery.start_soon(work)

    async def _answer(self, client: ServerClient, n: int) -> None:
        """Answer a line, however often the server has no place for it."""
        request = self.requests[n]
        if request.url not in _PROMPTS:
            message = f"'url' must be one of {', '.join(_PROMPTS)}."
            self._append(n, None, {"code": "invalid_url", "message": message})
            return
        kept = {name: value for name, value in request.body.items() if name not in _DROPPED}
        data = msgspec.json.encode({**kept, "priority": self._priority})
        pause, n_tries = _PAUSE, 0
        while True:
            async with client.answer(
                request.url, {}, lambda _: (b"application/json", data), any_status=True
            ) as answer:
                body = await receive_all(answer, _MAX_ANSWER, client.name)
            if answer.status not in (*_BUSY, *_LATER):
                break
            n_tries += answer.status not in _BUSY
            if n_tries == _TRIES:
                self._given_up.add(n)
                return
            wanted = whole_number(answer.header(b"retry-after")) or 0
            await trio.sleep(min(max(pause, wanted), _MAX_PAUSE))
            pause *= 2
        status = answer.status
        if status != 200 and (status == 401 or not 400 <= status < 500):
            raise error_in(body, status, client.name)
        try:
            value: Any = read_json(body, dict, client.name)
        except TrioServeError:
            if status == 200:
                raise
            value = body.decode(errors="replace")
        request_id = answer.header(b"x-request-id").decode("latin-1")
        self._append(n, {"status_code": status, "request_id": request_id, "body": value})

    def _append(
        self, n: int, response: Mapping[str, Any] | None, error: Mapping[str, str] | None = None
    ) -> None:
        """Write the answer to a line, at once: no other task runs, so none is lost or mixed."""
        id_ = self.requests[n].custom_id
        line = {"id": f"batch_req_{n}", "custom_id": id_, "response": response, "error": error}
        data = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while data:
                data = data[self.file.write(data) :]
        except OSError as failure:
            raise ConfigError(f"{self.target}: {failure.strerror}") from None
        self.answered[id_] = response is not None and response["status_code"] == 200
