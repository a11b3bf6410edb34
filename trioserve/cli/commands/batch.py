"""``trioserve batch``: answers the requests of a file, and writes the answers to another one."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import trio

from trioserve.cli.address import Address, take_value
from trioserve.cli.commands import duration_text, hush
from trioserve.cli.local_server import client_of, started
from trioserve.cli.progress import ProgressReport
from trioserve.concurrency import alongside
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, InvalidRequestError, TrioServeError, first_error
from trioserve.router.client import ServerClient, receive_all

#: Seconds between two looks at the progress.
_INTERVAL = 0.5

_BOUNDARY = "trioserve-batch-6f1d0c5e7a"
_BAR = 20  # characters


class _File(msgspec.Struct):
    id: str


class _Counts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class _Batch(msgspec.Struct):
    id: str
    status: str
    request_counts: _Counts
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a file is invalid.
        TrioServeError: the server does not start, or refuses the batch.
    """
    url, words = take_value("--url", argv)
    output, words = take_value("-o", words)
    if output is None:
        output, words = take_value("--output", words)
    if not words or words[0].startswith("-") or output is None or output == "-":
        raise ConfigError("name two files, such as trioserve batch input.jsonl -o output.jsonl")
    source, target, flags = Path(words[0]), Path(output), words[1:]
    config = parse(flags, environ).config
    hush(config)
    left, endpoint = _left_of(source, target)
    if not left.strip():
        print(f"{target} has the answers of all lines")
        return 0

    async def work() -> int:
        async with AsyncExitStack() as stack:
            if url is None:
                address = await stack.enter_async_context(started(flags, config, environ))
            else:
                address = Address.of(url, config)
            key = next(iter(config.api_keys), None)
            client = await stack.enter_async_context(client_of(address, key))
            return await _run(client, left, endpoint, target)

    try:
        return trio.run(work)
    except* TrioServeError as group:
        raise first_error(group) from None


def _answered(target: Path) -> set[str]:
    """The ids of the lines that the output has answers to. Make it if it does not exist.

    An answer at its end that was cut off, when its disk was full, is removed.

    Raises:
        ConfigError: it cannot be written, or has something else.
    """
    if target.exists() and not target.is_file():
        raise ConfigError(f"{target} is not a file")
    try:
        with target.open("a+b") as file:
            file.seek(0)
            *lines, rest = file.read().split(b"\n")
            ids = {str(json.loads(line)["custom_id"]) for line in lines if line.strip()}
            if rest.startswith(b'{"id"'):
                file.truncate(file.tell() - len(rest))
            elif rest:
                raise ValueError
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{target} has lines that are no answers; name another output") from None
    return ids


def _left_of(source: Path, target: Path) -> tuple[bytes, str]:
    """The input with empty lines in place of those with an answer, and the endpoint.

    Raises:
        ConfigError: a file cannot be read, or the output cannot be written.
    """
    try:
        lines = source.read_bytes().splitlines()
        requests = {n: json.loads(line) for n, line in enumerate(lines) if line.strip()}
        ids = {n: str(fields.get("custom_id")) for n, fields in requests.items()}
        endpoint = next(iter(requests.values()))["url"] if requests else ""
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{source} must have an object with custom_id, url and body on each line"
        ) from None
    if not requests:
        raise ConfigError(f"{source} is empty")
    answered = _answered(target)
    for n, id_ in ids.items():
        if id_ in answered:
            lines[n] = b""
    return b"\n".join(lines), str(endpoint)


async def _run(client: ServerClient, lines: bytes, endpoint: str, target: Path) -> int:
    """Have a server answer lines, and append the answers to a file. SIGINT cancels the rest.

    Returns the exit code: 1 if a line has failed.
    """
    write = partial(_form, lines)
    async with client.answer("/v1/files", {}, write) as answer:
        file = msgspec.json.decode(await receive_all(answer), type=_File)
    wanted = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
    batch = await client.ask("/v1/batches", wanted, form=_Batch)
    if batch.errors is not None:
        for error in batch.errors["data"]:
            print(f"trioserve: line {error['line']}: {error['message']}", file=sys.stderr)
        return 1
    is_cancelled = False

    async def watch() -> None:
        nonlocal is_cancelled
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            await anext(signals)
            is_cancelled = True
            with suppress(InvalidRequestError):  # it is over already
                await client.ask(f"/v1/batches/{batch.id}/cancel", {}, form=_Batch)

    began = monotonic()
    with ProgressReport(sys.stderr, n_log_lines=0) as progress:
        async with alongside(watch):
            while batch.status in ("in_progress", "cancelling"):
                share, line = _line(batch.request_counts, monotonic() - began)
                progress.tell(share, line, "answering")
                await trio.sleep(_INTERVAL)
                batch = await client.ask(f"/v1/batches/{batch.id}", form=_Batch)
    for id_ in filter(None, (batch.output_file_id, batch.error_file_id)):
        async with client.answer(f"/v1/files/{id_}/content") as answer:
            data = await receive_all(answer)
        await trio.to_thread.run_sync(_append, target, data)
    counts = batch.request_counts
    print(f"{target}: {counts.completed} answers, {counts.failed} errors")
    if is_cancelled:
        print("trioserve: interrupted; the same command continues from here", file=sys.stderr)
        return 128 + signal.SIGINT
    return 1 if counts.failed else 0


def _form(lines: bytes, _body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Write the form that uploads lines."""
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="'
    purpose = f'{head}purpose"\r\n\r\nbatch\r\n'
    file = f'{head}file"; filename="batch.jsonl"\r\n\r\n'
    data = (purpose + file).encode() + lines + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return f"multipart/form-data; boundary={_BOUNDARY}".encode(), data


def _line(counts: _Counts, seconds: float) -> tuple[float, str]:
    """The share of the lines that are answered, and the line that tells of it."""
    done = counts.completed + counts.failed
    bar = ("#" * (done * _BAR // counts.total)).ljust(_BAR)
    left = duration_text(seconds / done * (counts.total - done)) if done else "?"
    text = f"[{bar}] {done} of {counts.total} lines, {left} left\x1b[K"
    return done / counts.total, text


def _append(target: Path, data: bytes) -> None:
    try:
        with target.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None
