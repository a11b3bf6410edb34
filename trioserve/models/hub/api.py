"""The hub's API: which files a repository has, how large they are, and what their hashes are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, urljoin

import attrs

from trioserve.errors import HubError
from trioserve.models.hub.http import Answer, HttpClient

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NEXT = re.compile(r"<([^>]+)>;\s*rel=\"?next\"?")


@attrs.frozen(kw_only=True)
class RemoteFile:
    """A file on a server. `digest` is a SHA-256, or for small files the SHA-1 of Git."""

    name: str  # for messages: the repository and the path
    url: str
    size: int | None
    digest: str | None


@attrs.frozen
class Listing:
    """The files of a repository, as its newest commit on a branch has them."""

    branch: str
    commit: str
    files: Mapping[str, RemoteFile]


async def list_files(client: HttpClient, repo: str) -> Listing:
    """Ask the hub for the files of a repository.

    Raises:
        HubError: one of its family, which says what is wrong.
    """
    branch, commit = await _newest(client, repo)
    base = f"{client.endpoint}/{repo}/resolve/{commit}/"
    url: str | None = f"{client.endpoint}/api/models/{repo}/tree/{commit}?recursive=true"
    files: dict[str, RemoteFile] = {}
    while url is not None:
        entries, answer = await client.json(url, repo)
        files |= dict(_files(entries, repo, base))
        url = _next_page(answer)
    return Listing(branch, commit, files)


async def _newest(client: HttpClient, repo: str) -> tuple[str, str]:
    """The branch main and its commit; without such a branch, the first."""
    refs, _ = await client.json(f"{client.endpoint}/api/models/{repo}/refs", repo)
    entries = refs.get("branches") if isinstance(refs, dict) else None
    branches = {
        one["name"]: one["targetCommit"]
        for one in _dicts(entries)
        if _is_path(one.get("name")) and _is(_COMMIT, one.get("targetCommit"))
    }
    if not branches:
        raise HubError(f"{client.endpoint} names no branch of {repo}; look at HF_ENDPOINT.")
    name = "main" if "main" in branches else next(iter(branches))
    return name, branches[name]


def _files(entries: Any, repo: str, base: str) -> Iterator[tuple[str, RemoteFile]]:
    for one in _dicts(entries):
        path, lfs = one.get("path"), one.get("lfs")
        if one.get("type") == "file" and isinstance(path, str) and _is_path(path):
            contents = lfs if isinstance(lfs, dict) else one  # the others are in Git itself
            size, digest = contents.get("size"), contents.get("oid")
            is_sound = isinstance(size, int) and _is(_DIGEST, digest)
            yield (
                path,
                RemoteFile(
                    name=f"{repo}/{path}",
                    url=base + quote(path),
                    size=size if is_sound else None,
                    digest=digest if is_sound else None,
                ),
            )


def _next_page(answer: Answer) -> str | None:
    match = _NEXT.search(answer.headers.get("link", ""))
    return match and urljoin(answer.url, match[1])


def _dicts(entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list):
        raise HubError("The hub's answer is no list of files; look at HF_ENDPOINT.")
    return [one for one in entries if isinstance(one, dict)]


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_path(value: Any) -> bool:
    """Whether this is a path that stays within the folder that it is in."""
    if not isinstance(value, str) or not value or "\\" in value or not value.isprintable():
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and ".." not in path.parts and ":" not in path.parts[0]
