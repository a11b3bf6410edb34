"""Which files of a directory are models.

A directory holds GGUF files, and folders of what belongs together: the parts of a large model, or a
model with its projector for images. A folder of one model has its name; of several models in one
folder, each is named after the folder and the file. Folders in folders are not looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from trioserve.errors import ConfigError
from trioserve.models.gguf import PART, parts_of

_log = logging.getLogger("trioserve.models.catalog")

#: What the names of files begin with that draft for the model beside them, and run in no other way.
_DRAFTS = ("mtp-", "dspark-", "dflash-")


@attrs.frozen
class ModelFiles:
    """A model in a directory: its name, its files, the first part first, and its projector."""

    name: str
    files: tuple[Path, ...]
    mmproj: Path | None = None


def models_in(directory: Path) -> list[ModelFiles]:
    """List the models of a directory.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"models_dir: {directory} cannot be read: {error.strerror}") from None
    found = list(_models(entry for entry in entries if entry.is_file()))
    for folder in entries:
        if folder.is_dir() and not folder.name.startswith("."):
            found += _models_of_folder(folder)
    return found


def _models_of_folder(folder: Path) -> Iterator[ModelFiles]:
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    except OSError as error:
        _log.warning("the folder %s cannot be read: %s", folder, error.strerror)
        return
    models = list(_models(files))
    mmproj = next(filter(_is_projector, files), None)
    for one in models:
        name = folder.name if len(models) == 1 else f"{folder.name}/{one.name}"
        yield attrs.evolve(one, name=name, mmproj=mmproj)


def _models(files: Iterable[Path]) -> Iterator[ModelFiles]:
    for path in files:
        if not _is_gguf(path) or _is_projector(path) or path.name.startswith(_DRAFTS):
            continue
        part = PART.fullmatch(path.stem)
        if part is None:
            yield ModelFiles(path.stem, (path,))
        elif int(part["number"]) == 1:
            parts = parts_of(path)
            if missing := [each.name for each in parts if not each.is_file()]:
                _log.warning("%s is left out, for %s is missing", path, ", ".join(missing))
            else:
                yield ModelFiles(part["stem"], parts)


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not path.name.startswith(".")


def _is_projector(path: Path) -> bool:
    return _is_gguf(path) and "mmproj" in path.name.lower()
