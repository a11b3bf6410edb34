"""Remembers which files of models this machine has loaded, so that only new ones are tried first.

Files that are loaded together are one fingerprint: of their paths, sizes, times and inodes. It is
the name of an empty file in ``$XDG_STATE_HOME/trioserve/loaded``, by default in ``~/.local/state``.
The bundled model and its voice are trusted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from trioserve.config import Config
from trioserve.config.files import user_state
from trioserve.errors import ConfigError
from trioserve.log import get_logger
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR, gguf, resolve, resolve_projector
from trioserve.models.speech import BUNDLED_VOICE

_log = get_logger("trioserve")

#: Fingerprints that are kept: those that were used last.
_MAX_KEPT = 1000

_BUNDLED = (BUNDLED, BUNDLED_PROJECTOR, BUNDLED_VOICE.model, BUNDLED_VOICE.projector)

#: Those of this process, which remembers them without a folder, too.
_here: set[str] = set()


@attrs.frozen
class LoadedFiles:
    """The files that a configuration loads; `fingerprint` is empty if only bundled ones are.

    A file is loaded with its MTP heads or without them.
    """

    fingerprint: str
    _folder: Path | None

    @classmethod
    def of(cls, config: Config, version: str) -> LoadedFiles:
        """Look at the files. A `version` of llama.cpp has its own.

        Raises:
            ModelLoadError: the model is one of the hub that is not in the cache.
        """
        found = [
            " ".join((os.path.abspath(path), *map(str, gguf.version_of(path))))
            for path in _files(config)
        ]
        if not found:
            return cls("", None)
        heads = [config.head_type] if config.head_type is not None else []
        parts = (version, str(config.serves_embeddings), *heads, *found)
        return cls(hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest(), _folder(os.environ))

    @property
    def are_known(self) -> bool:
        """True if they were loaded before, as they are."""
        if not self.fingerprint or self.fingerprint in _here:
            return True
        return self._folder is not None and (self._folder / self.fingerprint).exists()

    def remember(self) -> None:
        """Note that they were loaded."""
        if not self.fingerprint:
            return
        _here.add(self.fingerprint)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / self.fingerprint).touch()
            _forget_oldest(self._folder)
        except OSError as error:
            _log.info("the files are tried at each start", reason=str(error))


def _files(config: Config) -> Iterator[Path]:
    model = resolve(config.model)
    if model not in _BUNDLED:
        yield from gguf.parts_of(model)
    projector = None if config.reranking else resolve_projector(config)
    if projector is not None and projector not in _BUNDLED:
        yield projector
    if config.spec_draft_model is not None:
        yield from gguf.parts_of(resolve(config.spec_draft_model))
    for path, _ in (*config.lora_files, *config.control_vector_files):
        yield Path(path)


def _folder(environ: Mapping[str, str]) -> Path | None:
    try:
        return user_state(environ) / "loaded"
    except ConfigError:  # no HOME, and no entry in passwd
        return None


def _forget_oldest(folder: Path) -> None:
    names = os.listdir(folder)
    if len(names) <= _MAX_KEPT:
        return
    times = {}
    for name in names:
        with suppress(OSError):  # another server has removed it
            times[folder / name] = (folder / name).stat().st_mtime
    for path in sorted(times, key=times.__getitem__)[: len(times) - _MAX_KEPT]:
        path.unlink(missing_ok=True)
