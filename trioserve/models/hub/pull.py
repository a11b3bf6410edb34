"""`pull`: brings a model from the hub into the cache."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import attrs
import structlog
import trio

from trioserve.errors import HubError
from trioserve.models.hub.cache import (
    HubModel,
    RepoFolder,
    default_cache_dir,
    default_endpoint,
    default_token,
)
from trioserve.models.hub.client import HttpClient, Listing, RemoteFile, list_files, open_client
from trioserve.models.hub.download import (
    OnProgress,
    PartialFile,
    Reporter,
    locked,
    open_partial,
    transfer,
)
from trioserve.models.hub.reference import HubReference, choose, name_of, projector_beside

_log = structlog.stdlib.get_logger("trioserve.hub")


@attrs.frozen(kw_only=True)
class RemoteModel:
    """A model on the hub, as its newest commit has it."""

    reference: HubReference
    listing: Listing
    files: Mapping[str, RemoteFile]  # all parts by their paths, the first one first
    #: The projector for images and sound, if there is one: its path, and the file.
    projector: tuple[str, RemoteFile] | None

    @property
    def name(self) -> str:
        """What it is called in the cache: ``user/repo:QUANT``."""
        return name_of(self.reference.repo, next(iter(self.files)))

    @property
    def everything(self) -> Mapping[str, RemoteFile]:
        """The parts and the projector, by their paths."""
        return self.files if self.projector is None else dict([*self.files.items(), self.projector])

    @property
    def size(self) -> int:
        """The size of all of that together, in bytes."""
        return sum(file.size or 0 for file in self.everything.values())


async def look_up(
    reference: HubReference, *, token: str | None = None, endpoint: str | None = None
) -> RemoteModel:
    """Ask the hub for a model, and download nothing.

    Raises:
        HubError: one of its family, which says what is wrong in a sentence.
    """
    async with _client(token, endpoint) as client:
        return await _look_up(client, reference)


async def pull(
    reference: HubReference,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    with_projector: bool = True,
    on_progress: OnProgress = lambda progress: None,
) -> HubModel:
    """Bring a model into the cache, or what is missing of it, as the newest commit has it.

    A download that was cancelled, or whose process died, goes on where it ended. If somebody else
    downloads the same file, in this process or in another, this waits for that.

    Args:
        reference: which model.
        token: shows the hub who asks; the default is that of the environment.
        endpoint: the address of the hub; the default is that of the environment.
        cache_dir: the cache; the default is that of the environment.
        with_projector: bring the projector for images and sound as well, if there is one.
        on_progress: told how far it is, several times a second.

    Raises:
        HubError: one of its family, which says what is wrong in a sentence.
    """
    async with _client(token, endpoint) as client:
        model = await _look_up(client, reference)
        if not with_projector:
            model = attrs.evolve(model, projector=None)
        folder = RepoFolder(cache_dir or default_cache_dir(), reference.repo)
        return await _Download(client, model, folder, on_progress).run()


def _client(token: str | None, endpoint: str | None) -> AbstractAsyncContextManager[HttpClient]:
    return open_client(
        (endpoint or default_endpoint()).rstrip("/"), default_token() if token is None else token
    )


async def _look_up(client: HttpClient, reference: HubReference) -> RemoteModel:
    listing = await list_files(client, reference.repo)
    paths = list(listing.files)
    parts = choose(paths, reference)
    projector = projector_beside(paths, parts[0])
    for part in (*parts, *([] if projector is None else [projector])):
        if listing.files[part].digest is None:
            raise HubError(f"{client.endpoint} does not say what the hash of {part} is.")
    return RemoteModel(
        reference=reference,
        listing=listing,
        files={part: listing.files[part] for part in parts},
        projector=None if projector is None else (projector, listing.files[projector]),
    )


class _Download:
    """The files of one model, on their way into the cache."""

    def __init__(
        self, client: HttpClient, model: RemoteModel, folder: RepoFolder, on_progress: OnProgress
    ) -> None:
        self._client = client
        self._model = model
        self._files = model.everything
        self._folder = folder
        sizes = {file.url: file.size or 0 for file in self._files.values()}
        self._reporter = Reporter(sizes, on_progress)

    async def run(self) -> HubModel:
        """Get what is missing, and make the links when all of it is there."""
        by_digest = {self._digest(path): path for path in self._files}
        async with AsyncExitStack() as stack:
            # All room is reserved before the first byte comes. The order is the same for all, so
            # that no two wait for each other.
            opened = {path: await self._open(stack, path) for _, path in sorted(by_digest.items())}
            for path, partial_file in opened.items():
                if partial_file is not None:
                    await self._transfer(path, partial_file)
        return await trio.to_thread.run_sync(self._publish)

    async def _open(self, stack: AsyncExitStack, path: str) -> PartialFile | None:
        """Lock a file and open what there is of it; None if all of it is there."""
        file = self._files[path]
        lock = self._folder.lock(self._digest(path))
        if not await trio.to_thread.run_sync(self._is_there, path):
            await stack.enter_async_context(locked(lock, partial(self._watch, path)))
        if await trio.to_thread.run_sync(self._is_there, path):  # somebody else got it
            self._report(path, file.size or 0)
            return None
        return await stack.enter_async_context(
            open_partial(self._incomplete(path), file, partial(self._report, path))
        )

    async def _transfer(self, path: str, partial_file: PartialFile) -> None:
        await transfer(
            self._client,
            self._files[path],
            partial_file,
            self._folder.blob(self._digest(path)),
            partial(self._report, path),
        )

    def _publish(self) -> HubModel:
        listing = self._model.listing
        for path in self._files:
            self._folder.link(listing.commit, path, self._digest(path))
        self._folder.set_ref(listing.branch, listing.commit)
        model = self._folder.model(listing.commit, next(iter(self._model.files)))
        assert model is not None  # all files are there
        return model

    def _digest(self, path: str) -> str:
        digest = self._files[path].digest
        assert digest is not None  # `_look_up` has seen to it
        return digest

    def _is_there(self, path: str) -> bool:
        size = self._files[path].size
        blob = self._folder.blob(self._digest(path))
        link = self._folder.file(self._model.listing.commit, path)
        return any(one.is_file() and one.stat().st_size == size for one in (link, blob))

    def _incomplete(self, path: str) -> Path:
        return self._folder.blob(f"{self._digest(path)}.incomplete")

    def _watch(self, path: str) -> None:
        """Report how far somebody else is."""
        with suppress(OSError):
            self._report(path, self._incomplete(path).stat().st_size)

    def _report(self, path: str, n_bytes: int) -> None:
        self._reporter(self._files[path].url, n_bytes)
