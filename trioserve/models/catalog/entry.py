"""What the catalog says of a model."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import attrs


class Source(Enum):
    """Where a model is from. One that has a section in the preset file is from there."""

    BUNDLED = "bundled"
    CACHE = "cache"
    DIRECTORY = "directory"
    PRESET = "preset"


@attrs.frozen(kw_only=True)
class ModelEntry:
    """A model that can be served, and how.

    Attributes:
        name: as lists of models show it.
        source: where it is from.
        args: the flags of a server of it: the model, and all that was set for it.
        path: the first GGUF file; None while it has to be downloaded.
        aliases: other names.
        tags: as lists of models show them.
        mmproj: the file beside it for images and sound.
        size: bytes of its files; 0 if unknown.
        version: time and size of the first file, which tell that it was replaced.
        hidden: left out of lists, because another entry has the same file.
        load_on_startup: loaded before anybody asks for it.
        stop_timeout: seconds that it has to end.
    """

    name: str
    source: Source
    args: tuple[str, ...]
    path: Path | None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    mmproj: Path | None = None
    size: int = 0
    version: tuple[int, int] | None = None
    hidden: bool = False
    load_on_startup: bool = False
    stop_timeout: float = 10.0

    def runs_like(self, other: ModelEntry) -> bool:
        """Whether a server of one is a server of the other: the same flags and the same file."""
        return (self.args, self.path, self.version) == (other.args, other.path, other.version)


@attrs.frozen
class CatalogChanges:
    """The names whose entries a reload has added, removed, or changed to run differently."""

    added: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
