"""`Ignored`: what the .gitignore files of a repository say is not worth looking at.

Git itself is not asked: it runs programs that the configuration of a repository names, and tools
may write that.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import re2
from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore import GitIgnorePatternError

from trioserve.errors import ToolFileError
from trioserve.tools.files.patterns import shown
from trioserve.tools.paths import Fence

_MAX_BYTES = 2**16  # of one .gitignore file
_MAX_LINES = 2000


class Ignored:
    """The .gitignore files from the top of a repository down. They are read when first needed."""

    def __init__(self, fence: Fence, top: str, base: str) -> None:
        """Take the repository whose top is `top`, for paths relative to its directory `base`."""
        self._fence = fence
        self._top = top
        self._base = "" if base == top else f"{Path(base).relative_to(top)}/"
        self._specs: dict[str, GitIgnoreSpec] = {}

    @classmethod
    def around(cls, fence: Fence, base: str) -> Ignored | None:
        """That of the repository which a directory is in; None: there is none inside the fence,
        or it ignores the whole directory."""
        for top in (Path(base), *Path(base).parents):
            if not _is_inside(fence, str(top)):
                return None
            if os.path.lexists(top / ".git"):
                ignored = cls(fence, str(top), base)
                return None if ignored._has(ignored._base) else ignored
        return None

    def has(self, path: str, *, is_dir: bool) -> bool:
        """Whether a path is ignored that no ignored directory is above."""
        return self._has(f"{self._base}{path}/" if is_dir else self._base + path)

    def _has(self, path: str) -> bool:
        """Whether a path from the top is ignored. The innermost file that knows it decides."""
        folder = path.rstrip("/")
        while folder:
            folder = folder.rpartition("/")[0]
            included = self._spec_of(folder).check_file(shown(path[len(folder) :].lstrip("/")))
            if included.include is not None:
                return included.include
        return False

    def _spec_of(self, folder: str) -> GitIgnoreSpec:
        spec = self._specs.get(folder)
        if spec is None:
            spec = self._specs[folder] = _spec_of(self._lines_of(folder))
        return spec

    def _lines_of(self, folder: str) -> list[str]:
        names = [".gitignore"] if folder else [".git/info/exclude", ".gitignore"]
        return [line for name in names for line in self._read(os.path.join(folder, name))]

    def _read(self, path: str) -> list[str]:
        try:
            with open(self._fence.open_file(os.path.join(self._top, path)), "rb") as file:
                text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        except (OSError, ToolFileError):
            return []
        return text.splitlines()[:_MAX_LINES]


def _spec_of(lines: list[str]) -> GitIgnoreSpec:
    usable = [line for line in lines if line.strip() and _is_pattern(line)]
    # RE2 takes linear time for what a model may have written.
    return GitIgnoreSpec.from_lines(usable, backend="re2" if usable else "simple")


def _is_pattern(line: str) -> bool:
    try:
        GitIgnoreSpec.from_lines([line], backend="re2")
    except (GitIgnorePatternError, re.error, re2.error):
        return False
    return True


def _is_inside(fence: Fence, real: str) -> bool:
    try:
        fence.resolve(real)
    except ToolFileError:
        return False
    return True
