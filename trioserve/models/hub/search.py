"""Looks for models on the hub, and learns what they would need before they are downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import trio

from trioserve.errors import HubError, ModelLoadError
from trioserve.models import gguf
from trioserve.models.gguf import GgufName
from trioserve.models.hub.client import HttpClient, RemoteFile, list_files
from trioserve.models.hub.download import disk_errors
from trioserve.models.hub.pull import client_of, look_up_with
from trioserve.models.hub.reference import HubReference, is_repo, models_in, name_of

#: Repositories of an answer.
_N_FOUND = 20

#: Bytes between two attempts to read a header that is still coming; they double.
_FIRST_LOOK = 2**20

#: Bytes that a header may have, and files that a model may have to be sketched.
_MAX_HEADER, _MAX_FILES = 2**26, 32


class Repository(msgspec.Struct, frozen=True):
    """A repository with models, as the hub lists it."""

    id: str
    downloads: int = 0
    likes: int = 0
    gated: bool | str = False


class Offer(msgspec.Struct, frozen=True):
    """A model of a repository. `size` counts all files that come with it, in bytes."""

    name: str
    size: int


async def search(words: str, *, token: str | None = None) -> list[Repository]:
    """Find repositories with GGUF files, those with the most downloads first.

    Raises:
        HubError: the hub cannot be asked, or its answer cannot be read.
    """
    asked = {"search": words, "filter": "gguf", "sort": "downloads", "limit": _N_FOUND}
    async with client_of(token) as client:
        found, _ = await client.json(f"{client.endpoint}/api/models?{urlencode(asked)}", words)
    try:
        known = msgspec.convert(found, list[Repository])
    except msgspec.ValidationError as error:
        raise HubError(f"{client.endpoint} does not answer as the hub does: {error}.") from None
    return [one for one in known if is_repo(one.id)][:_N_FOUND]


async def offers(repo: str, *, token: str | None = None) -> list[Offer]:
    """List the models of a repository, the smallest first.

    Raises:
        InvalidRequestError: this is no name of a repository.
        HubError: the hub has no such repository, or cannot be asked.
    """
    repo = HubReference.parse(repo).repo
    found: dict[str, Offer] = {}
    async with client_of(token) as client:
        listing = await list_files(client, repo)
        for path in models_in(listing.files):
            name = name_of(repo, path)
            if name not in found:
                files = (listing.files.get(part) for part in GgufName.parts_of(path))
                size = sum(0 if one is None else one.size or 0 for one in files)
                found[name] = Offer(name, size)
    return sorted(found.values(), key=lambda one: one.size)


async def sketch(reference: HubReference, folder: Path, *, token: str | None = None) -> list[Path]:
    """Save the headers of a model's files, in files that are as long as these and otherwise empty.

    llama.cpp can estimate with them what the model needs. Returns their paths, that of the model
    first; the projector's is the last, if there is one.

    Raises:
        HubError: the hub does not have the model, or cannot be asked.
        ModelLoadError: a file is no GGUF file.
    """
    async with client_of(token) as client:
        model = await look_up_with(client, reference)
        if len(model.files) > _MAX_FILES:
            raise HubError(f"{reference} has {len(model.files)} files, more than {_MAX_FILES}.")
        places = []
        for path, file in model.files.items():
            place = folder / os.path.basename(path)
            await _save_header(client, file, place)
            places.append(place)
    return places


async def _save_header(client: HttpClient, file: RemoteFile, place: Path) -> None:
    """Download a file until its header is complete."""
    n_bytes, look_at = 0, _FIRST_LOOK
    async with client.get(file.url, {"Range": f"bytes=0-{_MAX_HEADER}"}) as answer:
        client.check(answer, file.name)
        is_whole = False
        while not is_whole:
            batch = await answer.batch()
            chunk = b"".join(batch)
            n_bytes += len(chunk)
            await trio.to_thread.run_sync(_append, place, chunk)
            if batch and n_bytes < look_at and n_bytes < _MAX_HEADER:
                continue
            look_at = 2 * n_bytes
            is_last = not batch or n_bytes >= _MAX_HEADER
            is_whole = await trio.to_thread.run_sync(_has_header, place, is_last)
    await trio.to_thread.run_sync(_extend, place, file.size or n_bytes)


def _append(place: Path, chunk: bytes) -> None:
    with disk_errors(place), place.open("ab") as file:
        file.write(chunk)


def _extend(place: Path, size: int) -> None:
    """Make a file as long as it says, with a hole at its end."""
    with disk_errors(place):
        os.truncate(place, size)


def _has_header(place: Path, is_last: bool) -> bool:
    """True if a file has its whole header. If not, and `is_last`, raises ModelLoadError."""
    try:
        with gguf.read(place) as header:
            return header.data_start() > 0
    except ModelLoadError:
        if is_last:
            raise
        return False
