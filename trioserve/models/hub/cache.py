"""The cache of downloaded models, in the layout of huggingface_hub, which llama.cpp also uses.

::

    CACHE/.locks/models--user--name/HASH.lock
    CACHE/models--user--name/blobs/HASH                 the contents of a file
    CACHE/models--user--name/blobs/HASH.incomplete      a part, while it is downloaded
    CACHE/models--user--name/snapshots/COMMIT/FILE      a link to a blob
    CACHE/models--user--name/refs/main                  the newest commit

The links of a model are made when all of its files are complete, and the ref after them, so another
program never finds an incomplete model. All functions here block.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
from filelock import FileLock

from trioserve.config.files import expanded, user_cache
from trioserve.errors import ConfigError, HubError, HubNotFoundError, UnknownQuantError
from trioserve.models.gguf import GgufName
from trioserve.models.hub.download import disk_errors, try_lock
from trioserve.models.hub.reference import (
    HubReference,
    choose,
    choose_first,
    head_beside,
    is_repo,
    models_in,
    name_of,
    projector_beside,
)

_ENDPOINT = "https://huggingface.co"
_TRUE = frozenset({"1", "on", "yes", "true"})


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of models, which is that of llama.cpp and huggingface_hub.

    Raises:
        ConfigError: no variable names it, and the user has no home folder.
    """
    for name, *rest in (
        ("LLAMA_CACHE",),
        ("HF_HUB_CACHE",),
        ("HUGGINGFACE_HUB_CACHE",),
        ("HF_HOME", "hub"),
    ):
        if folder := environ.get(name):
            return expanded(Path(folder, *rest))
    return user_cache(environ) / "huggingface" / "hub"


def default_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """The address of the hub."""
    return environ.get("MODEL_ENDPOINT") or environ.get("HF_ENDPOINT") or _ENDPOINT


def default_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The user's token: from a variable, or from ``hf auth login``."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := environ.get(name, "").strip():
            return token
    try:
        home = environ.get("HF_HOME") or user_cache(environ) / "huggingface"
        path = expanded(environ.get("HF_TOKEN_PATH") or Path(home, "token"))
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError, ConfigError):
        return None


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if huggingface_hub's variable forbids downloads."""
    return environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE


_PREFIX = "models--"


@attrs.frozen(kw_only=True)
class HubModel:
    """A model in the cache, with all of its files."""

    name: str  # "user/repo:QUANT"
    files: tuple[Path, ...]  # all parts, the first one first
    mmproj: Path | None  # the projector for images, if it is in the cache
    head: Path | None = None  # the first file of a head for drafts, if it is in the cache
    size: int  # of `files` together, in bytes


@attrs.frozen
class RepoFolder:
    """The part of one repository in the cache."""

    cache: Path
    repo: str

    @property
    def path(self) -> Path:
        """The folder of the repository."""
        return self.cache / (_PREFIX + self.repo.replace("/", "--"))

    def blob(self, digest: str) -> Path:
        """Return the place of a file's contents."""
        return self.path / "blobs" / digest

    def lock(self, digest: str) -> Path:
        """The lock to hold while downloading a blob."""
        return self.cache / ".locks" / self.path.name / f"{digest}.lock"

    def file(self, commit: str, path: str) -> Path:
        """Return the place of a file of a commit."""
        return self.path / "snapshots" / commit / path

    def link(self, commit: str, path: str, digest: str) -> Path:
        """Give a blob its name in a commit; returns the path of that name."""
        link, blob = self.file(commit, path), self.blob(digest)
        with disk_errors(link):
            if link.is_file() and (link.is_symlink() or not blob.is_file()):
                return link
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # it was broken
            try:
                link.symlink_to(os.path.relpath(blob, link.parent))
            except FileExistsError:  # another process has just made it
                pass
            except OSError:
                os.replace(blob, link)  # where there are no links, a file has only this name
        return link

    def snapshots(self) -> list[Path]:
        """The folders of the commits: that of main first, then the newest ones."""
        try:
            found = [one for one in (self.path / "snapshots").iterdir() if one.is_dir()]
            found.sort(key=lambda one: one.stat().st_mtime, reverse=True)
        except OSError:
            return []
        try:
            main = (self.path / "refs" / "main").read_text().strip()
        except (OSError, UnicodeDecodeError):
            main = ""
        return sorted(found, key=lambda one: one.name != main)

    def models(self) -> Iterator[tuple[str, HubModel]]:
        """The complete models, with the path of each in the repository; newer commits first."""
        for snapshot in self.snapshots():
            paths = _files_in(snapshot)
            for path in models_in(paths):
                if (model := self._model(snapshot, paths, path)) is not None:
                    yield path, model

    def model(self, commit: str, path: str) -> HubModel | None:
        """The model whose first part this file is; None if not all of it is there."""
        snapshot = self.file(commit, "")
        return self._model(snapshot, _files_in(snapshot), path)

    def by_path(self) -> dict[str, HubModel]:
        """The complete models by their paths in the repository, as the newest commits have them."""
        found: dict[str, HubModel] = {}
        for path, model in self.models():
            found.setdefault(path, model)
        return found

    def unlink(self, is_gone: Callable[[str], bool]) -> None:
        """Delete files from all commits, and the blobs that no file links to any more."""
        paths = [(one / path, path) for one in self.snapshots() for path in _files_in(one)]
        gone = [link for link, path in paths if is_gone(path)]
        blobs = {_target_of(link) for link in gone}
        for link in gone:
            link.unlink()
        kept = {_target_of(link) for link, _ in paths if link.is_symlink()}
        for blob in blobs - kept:
            if blob.parent == self.path / "blobs":
                blob.unlink(missing_ok=True)

    def _model(self, snapshot: Path, paths: list[str], path: str) -> HubModel | None:
        try:
            parts = choose(paths, HubReference(self.repo, file=path))
        except HubNotFoundError:  # a part is missing
            return None
        files = tuple(snapshot / part for part in parts)
        projector, head = projector_beside(paths, path), head_beside(paths, path)
        try:
            size = sum(file.stat().st_size for file in files)
        except OSError:  # another process is deleting it
            return None
        return HubModel(
            name=name_of(self.repo, path),
            files=files,
            mmproj=None if projector is None else snapshot / projector,
            head=snapshot / head[0] if head else None,
            size=size,
        )


def cached_models() -> list[HubModel]:
    """The models in the cache that are complete, by name.

    Of several with one name, that of the newest commit counts.
    """
    found: dict[str, HubModel] = {}
    for repo in _repos():
        for _, model in repo.models():
            found.setdefault(model.name, model)
    return sorted(found.values(), key=lambda model: model.name.lower())


def find(reference: HubReference) -> HubModel | None:
    """Find a model in the cache; None if it is not there, or not all of it."""
    try:
        repo = RepoFolder(default_cache_dir(), reference.repo)
    except ConfigError:  # there is no such folder
        return None
    if reference.file is not None:
        found = (repo.model(one.name, reference.file) for one in repo.snapshots())
        return next(filter(None, found), None)
    for snapshot in repo.snapshots():
        if head := reference.head_in(_files_in(snapshot)):
            return repo.model(snapshot.name, head)
    models = repo.by_path()
    try:
        return models[choose_first(list(models), reference)]
    except HubNotFoundError:
        return None


def remove(reference: HubReference) -> HubModel:
    """Delete a model from the cache; returns its description.

    A quantization has to be the whole one in the model's name, though in any case. Blobs that
    another commit shares are kept. Unfinished downloads of the repository are deleted, too; if
    there is nothing else, the returned model has no files.

    Raises:
        HubNotFoundError: it is not in the cache, or the reference names none of several.
        HubError: it cannot be deleted.
    """
    repo = RepoFolder(default_cache_dir(), reference.repo)
    models = repo.by_path()
    with disk_errors(repo.path):
        if not models:
            return HubModel(name=reference.repo, files=(), mmproj=None, size=_clear(repo))
        names = sorted({model.name for model in models.values()})
        exact = f"{reference.repo}:{reference.quant}".upper()
        named = [path for path, one in models.items() if one.name.upper() == exact]
        first = choose_first(named or list(models), reference)
        if reference.file is None and reference.quant is not None and not named:
            raise UnknownQuantError(
                f"There is no model {reference}; those of {reference.repo} are {', '.join(names)}.",
                param="model",
            )
        if reference.quant is reference.file is None and len(names) > 1:
            raise UnknownQuantError(
                f"There are several models of {reference.repo}: {', '.join(names)}. Name one.",
                param="model",
            )
        gone = GgufName.parts_of(first)
        is_last = len(models) == 1
        repo.unlink(lambda path: path in gone or (is_last and path.endswith(".gguf")))
        _clear(repo)
    return models[first]


def _clear(repo: RepoFolder) -> int:
    """Delete unfinished downloads, and a folder without files.

    Returns:
        the bytes that were freed.

    Raises:
        HubNotFoundError: there is nothing to delete.
    """
    if not repo.path.is_dir():
        raise HubNotFoundError(f"{repo.repo} is not in the cache.")
    size = 0
    for path in (repo.path / "blobs").glob("*.incomplete"):
        lock = FileLock(repo.lock(path.name.partition(".")[0]), thread_local=False)
        if not try_lock(lock):
            raise HubError(f"{repo.repo} is being downloaded.")
        try:
            size += path.stat().st_size
            path.unlink()
        finally:
            lock.release()
    if not any(_files_in(snapshot) for snapshot in repo.snapshots()):
        shutil.rmtree(repo.path)
        shutil.rmtree(repo.lock("").parent, ignore_errors=True)  # which are empty files
    return size


def _repos() -> Iterator[RepoFolder]:
    try:
        cache = default_cache_dir()
        names = sorted(entry.name for entry in cache.iterdir())
    except (ConfigError, OSError):  # there is no cache yet
        return
    for name in names:
        repo = name.removeprefix(_PREFIX).replace("--", "/")
        if name.startswith(_PREFIX) and is_repo(repo):
            yield RepoFolder(cache, repo)


def _files_in(snapshot: Path) -> list[str]:
    """The files of a commit whose contents are there, as paths in the repository."""
    return sorted(
        path.relative_to(snapshot).as_posix()
        for path in snapshot.rglob("*")
        if path.is_file()  # a link whose blob is gone is none
    )


def _target_of(link: Path) -> Path:
    """Follow a link by one step; for a file, return its own path."""
    if not link.is_symlink():
        return link
    return Path(os.path.normpath(link.parent / link.readlink()))
