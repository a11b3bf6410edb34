"""Downloads a model from an address, in all of its parts: ``--model-url``.

Files are where llama.cpp has them: in its cache, each with its ETag in a file beside it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import attrs
import structlog
import trio

from trioserve.errors import HubError, HubUnavailableError
from trioserve.models.hub.cache import default_cache_dir, default_endpoint, default_token
from trioserve.models.hub.client import HttpClient, RemoteFile, open_client
from trioserve.models.hub.download import (
    OnBytes,
    OnProgress,
    Reporter,
    disk_errors,
    locked,
    open_partial,
    transfer,
)
from trioserve.models.hub.reference import parts_of

_log = structlog.stdlib.get_logger("trioserve.hub")

_SHA256 = re.compile(r"[0-9a-f]{64}")


@attrs.frozen(kw_only=True)
class _Found:
    """A file at an address, and where it goes."""

    file: RemoteFile
    version: str  # what the server says so that others can tell whether it has changed
    target: Path

    @property
    def is_there(self) -> bool:
        """Whether this version of the file is there."""
        if not self.target.is_file():
            return False
        known = _read(_etag_of(self.target))
        if known and self.version:
            return known == self.version
        return self.target.stat().st_size == self.file.size

    @property
    def incomplete(self) -> Path:
        """Where what there is of this version is."""
        mark = hashlib.sha256(f"{self.file.url} {self.version}".encode()).hexdigest()[:16]
        return self.target.with_name(f"{self.target.name}.{mark}.incomplete")


def place_of(url: str, path: Path | None = None) -> Path:
    """Where the file at an address goes: to `path`, or into llama.cpp's cache.

    The parts of a split model keep their names, by which llama.cpp finds them.

    Raises:
        HubError: the address has no name of a file.
    """
    name = os.path.basename(unquote(urlsplit(url).path))
    if path is not None and len(parts_of(name)) == 1:
        return path
    if not name.endswith(".gguf"):
        raise HubError(f"{url.partition('?')[0]} is not the address of a GGUF file.")
    return _cache_dir() / name if path is None else path.with_name(name)


async def pull(
    url: str, path: Path | None = None, *, token: str | None, on_progress: OnProgress
) -> Path:
    """Download the model at an address, unless it is there; returns its first file.

    What is there is taken as it is if the server cannot be reached. The token is for the hub, and
    goes nowhere else.

    Raises:
        HubError: one of its family, which says what is wrong in a sentence.
    """
    parts = urlsplit(url)
    urls = [urlunsplit(parts._replace(path=one)) for one in parts_of(parts.path)]
    targets = [place_of(one, path) for one in urls]
    async with open_client(default_endpoint().rstrip("/"), token or default_token()) as client:
        try:
            found = [await _ask(client, *one) for one in zip(urls, targets, strict=True)]
        except HubUnavailableError as error:
            if not all([await trio.Path(target).is_file() for target in targets]):
                raise
            _log.warning(f"{error.message} What is in the cache is served.", file=str(targets[0]))
            return targets[0]
        reporter = Reporter({one.file.url: one.file.size or 0 for one in found}, on_progress)
        for one in found:
            await _get(client, one, reporter)
    return targets[0]


async def _ask(client: HttpClient, url: str, target: Path) -> _Found:
    """Ask for a file, but read nothing of it."""
    async with client.get(url) as answer:
        parts = urlsplit(url)  # a query or a name of a user may hold a secret
        name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        client.check(answer, name)
        headers = answer.headers
        linked = headers.get("x-linked-etag", "").strip('"')
        return _Found(
            file=RemoteFile(
                name=name,
                url=url,
                size=answer.length,
                digest=linked if _SHA256.fullmatch(linked) else None,
            ),
            version=linked or headers.get("etag") or headers.get("last-modified") or "",
            target=target,
        )


async def _get(client: HttpClient, found: _Found, reporter: Reporter) -> None:
    report = partial(reporter, found.file.url)
    run = trio.to_thread.run_sync

    def watch() -> None:
        report(_size_of(found.incomplete))

    if not await run(lambda: found.is_there):
        mark = hashlib.sha256(str(found.target.absolute()).encode()).hexdigest()
        lock = default_cache_dir() / ".locks" / "urls" / f"{mark}.lock"
        async with locked(lock, watch):
            if not await run(lambda: found.is_there):
                await _download(client, found, report)
    report(found.file.size or 0)


async def _download(client: HttpClient, found: _Found, report: OnBytes) -> None:
    if not found.version:  # nobody can tell whether what there is is of the same file
        await trio.to_thread.run_sync(partial(found.incomplete.unlink, missing_ok=True))
    async with open_partial(found.incomplete, found.file, report) as partial_file:
        await transfer(client, found.file, partial_file, found.target, report)
    await trio.to_thread.run_sync(_write, _etag_of(found.target), found.version)


def _cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    if folder := environ.get("LLAMA_CACHE"):
        return Path(folder).expanduser()
    if sys.platform == "win32":
        base = Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "llama.cpp"


def _etag_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.etag")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path, text: str) -> None:
    with disk_errors(path):
        new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it is not there yet, or it is whole by now
        return 0
