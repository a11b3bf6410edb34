"""Brings models here: `pull` from the hub into its cache, `pull_url` from an address.

Files from an address (``--model-url``) are where llama.cpp has them: in its cache, each with its
ETag in a file beside it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import attrs
import trio

from trioserve.config.files import expanded, user_cache
from trioserve.errors import HubError, HubUnavailableError
from trioserve.log import get_logger
from trioserve.models.gguf import GgufName
from trioserve.models.head_families import FILE_WORDS
from trioserve.models.hub.cache import (
    HubModel,
    RepoFolder,
    default_cache_dir,
    default_endpoint,
    default_token,
)
from trioserve.models.hub.client import (
    HttpClient,
    HubResponse,
    Listing,
    RemoteFile,
    list_files,
    open_client,
)
from trioserve.models.hub.download import DownloadTarget, OnProgress, download, write_text
from trioserve.models.hub.reference import (
    HubReference,
    choose,
    head_beside,
    name_of,
    projector_beside,
)
from trioserve.whole_numbers import whole_number

_log = get_logger("trioserve.hub")


@attrs.frozen(kw_only=True)
class RemoteModel:
    """A model on the hub, as its newest commit has it.

    `files` has all parts by their paths, the first one first, and then the projector for images and
    sound, and the head for drafts, if there are any and they are wanted.
    """

    name: str  # in the cache: "user/repo:QUANT"
    listing: Listing
    files: Mapping[str, RemoteFile]


async def look_up(reference: HubReference, *, token: str | None = None) -> RemoteModel:
    """Ask the hub for a model, and download nothing.

    Raises:
        HubError: a subclass; its message is a sentence that names the problem.
    """
    async with client_of(token) as client:
        return await look_up_with(client, reference)


async def pull(
    reference: HubReference,
    *,
    token: str | None = None,
    with_projector: bool = True,
    heads: Iterable[str] = FILE_WORDS,
    on_progress: OnProgress = lambda progress: None,
) -> HubModel:
    """Bring a model into the cache, or what is missing of it, as the newest commit has it.

    A download that was cancelled, or whose process died, is resumed. This waits for files that
    another task downloads, in this process or in another.

    Args:
        reference: which model.
        token: shows the hub who asks; the default is that of the environment.
        with_projector: bring the projector for images and sound as well, if there is one.
        heads: types of drafts; bring the head of the first of them that there is one for.
        on_progress: called with the progress, several times a second.

    Raises:
        HubError: a subclass; its message is a sentence that names the problem.
    """
    async with client_of(token) as client:
        model = await look_up_with(client, reference, with_projector=with_projector, heads=heads)
        folder = RepoFolder(default_cache_dir(), reference.repo)
        by_digest = {_target(folder, model, path).lock: path for path in model.files}
        targets = [_target(folder, model, path) for path in by_digest.values()]
        await download(client, targets, on_progress)
    return await trio.to_thread.run_sync(_publish, folder, model)


def _target(folder: RepoFolder, model: RemoteModel, path: str) -> DownloadTarget:
    file = model.files[path]
    assert file.digest is not None  # `look_up_with` has seen to it
    blob, link = folder.blob(file.digest), folder.file(model.listing.commit, path)
    return DownloadTarget(
        file=file,
        path=blob,
        incomplete=folder.blob(f"{file.digest}.incomplete"),
        lock=folder.lock(file.digest),
        is_there=lambda: any(
            one.is_file() and one.stat().st_size == file.size for one in (link, blob)
        ),
    )


def _publish(folder: RepoFolder, model: RemoteModel) -> HubModel:
    """Make the links, when all files are there."""
    commit = model.listing.commit
    for path, file in model.files.items():
        folder.link(commit, path, file.digest or "")
    write_text(folder.path / "refs" / model.listing.branch, commit)
    found = folder.model(commit, next(iter(model.files)))
    assert found is not None
    return found


def client_of(token: str | None) -> AbstractAsyncContextManager[HttpClient]:
    """Make a client for the hub of the environment."""
    return open_client(default_endpoint().rstrip("/"), token or default_token())


async def look_up_with(
    client: HttpClient,
    reference: HubReference,
    *,
    with_projector: bool = True,
    heads: Iterable[str] = FILE_WORDS,
) -> RemoteModel:
    """As `look_up`, with a client."""
    listing = await list_files(client, reference.repo)
    paths = list(listing.files)
    parts = choose(paths, reference)
    projector = projector_beside(paths, parts[0]) if with_projector else None
    wanted = (*parts, projector, *head_beside(paths, parts[0], heads))
    files = {path: listing.files[path] for path in wanted if path is not None}
    for path, file in files.items():
        if file.digest is None:
            raise HubError(f"{client.endpoint} does not say what the hash of {path} is.")
    return RemoteModel(name=name_of(reference.repo, parts[0]), listing=listing, files=files)


# -- from an address

_SHA256 = re.compile(r"[0-9a-f]{64}")


def place_of(url: str, path: Path | None = None) -> Path:
    """Return the place for the file at an address: `path`, or in llama.cpp's cache.

    The parts of a split model keep their names, because llama.cpp finds them by name.

    Raises:
        HubError: the address does not end in a file name.
    """
    name = os.path.basename(unquote(urlsplit(url).path))
    if path is not None and len(GgufName.parts_of(name)) == 1:
        return path
    if not name.endswith(".gguf"):
        raise HubError(f"{url.partition('?')[0]} is not the address of a GGUF file.")
    return _cache_dir() / name if path is None else path.with_name(name)


async def pull_url(
    url: str, path: Path | None = None, *, token: str | None, on_progress: OnProgress
) -> Path:
    """Download the model at an address, unless it is there; returns its first file.

    Files of an earlier download are used if the server cannot be reached. The token is sent to the
    hub only.

    Raises:
        HubError: a subclass; its message is a sentence that names the problem.
    """
    parts = urlsplit(url)
    urls = [urlunsplit(parts._replace(path=one)) for one in GgufName.parts_of(parts.path)]
    places = [place_of(one, path) for one in urls]
    async with client_of(token) as client:
        try:
            targets = [await _ask(client, *one) for one in zip(urls, places, strict=True)]
        except HubUnavailableError as error:
            if not all([await trio.Path(place).is_file() for place in places]):
                raise
            _log.warning(f"{error.message} What is in the cache is served.", file=str(places[0]))
            return places[0]
        await download(client, targets, on_progress)
    return places[0]


async def _ask(client: HttpClient, url: str, place: Path) -> DownloadTarget:
    """Ask for a file, but read nothing of it."""
    async with client.get(url) as answer:
        parts = urlsplit(url)  # a query or a name of a user may hold a secret
        name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        client.check(answer, name)
        return _target_at(url, name, answer, place)


def _target_at(url: str, name: str, answer: HubResponse, place: Path) -> DownloadTarget:
    headers = answer.headers
    size = whole_number(headers.get("content-length", ""))
    linked = headers.get("x-linked-etag", "").strip('"')
    # Changes when the file does.
    version = linked or headers.get("etag") or headers.get("last-modified") or ""
    digest = linked if _SHA256.fullmatch(linked) else None
    note = place.with_name(f"{place.name}.etag")
    mark = hashlib.sha256(f"{url} {version}".encode()).hexdigest()[:16]
    lock = hashlib.sha256(str(place.absolute()).encode()).hexdigest()

    def is_there() -> bool:
        if not place.is_file():
            return False
        known = _read(note)
        return known == version if known and version else place.stat().st_size == size

    return DownloadTarget(
        file=RemoteFile(name=name, url=url, size=size, digest=digest),
        path=place,
        incomplete=place.with_name(f"{place.name}.{mark}.incomplete"),
        lock=default_cache_dir() / ".locks" / "urls" / f"{lock}.lock",
        is_there=is_there,
        on_done=partial(write_text, note, version),
        can_resume=bool(version),  # or the partial file may be of another version
    )


def _cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    if folder := environ.get("LLAMA_CACHE"):
        return expanded(folder)
    if sys.platform == "win32":
        base = expanded(environ.get("LOCALAPPDATA") or "~/AppData/Local")
    elif sys.platform == "darwin":
        base = expanded("~/Library/Caches")
    else:
        base = user_cache(environ)
    return base / "llama.cpp"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
