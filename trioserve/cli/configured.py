"""Programs that ``trioserve launch`` configures: a change of a file, and how it is undone.

What a program had before is recorded in the state folder. If the user has changed the file since,
only what is still as it was written is undone.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import msgspec

from trioserve.cli.agents import CONFIGURED, NO_KEY, Configured, Endpoint, filled
from trioserve.cli.jsonc import Document, as_path, named
from trioserve.config import readers
from trioserve.config.files import replace_file
from trioserve.errors import ConfigError

_KEY = re.compile(r'("apiKey": )"[^"]*"')


class _Change(msgspec.Struct):
    """A value that was set. `before`: the old one, as JSON; None: the value is new.

    `n_there`: how many steps of its path there were.
    """

    path: list[str | tuple[str, str]]
    after: object
    before: str | None
    n_there: int


class _Record(msgspec.Struct):
    """The changes to a file. `before`: its old text; None: the file is new."""

    file: str
    before: str | None
    after: str
    changes: list[_Change]


@attrs.frozen
class Settings:
    """The file of a program, and the record of what was changed in it.

    Raises:
        ConfigError: from methods, if a file cannot be read, changed or written.
    """

    program: Configured
    path: Path
    record_path: Path

    @classmethod
    def of(cls, name: str, environ: Mapping[str, str]) -> Settings:
        home = Path(environ.get("HOME") or Path.home())
        settings = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
        if sys.platform == "darwin":
            settings = home / "Library" / "Application Support"
        elif sys.platform == "win32":
            settings = Path(environ.get("APPDATA") or home / "AppData" / "Roaming")
        state = Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state")
        program = CONFIGURED[name]
        record = state / "trioserve" / "launch" / f"{name}.json"
        place = filled(program.place, {"settings": settings, "home": home})
        return cls(program, Path(place), record)

    def _text(self) -> str | None:
        return readers.file(str(self.path)) if self.path.exists() else None

    def _record(self) -> _Record | None:
        if not self.record_path.exists():
            return None
        try:
            return msgspec.json.decode(readers.file(str(self.record_path)), type=_Record)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.record_path} cannot be read: {error}") from None

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file where its text cannot be changed."""
        try:
            yield
        except ValueError as error:
            raise ConfigError(f"{self.path}: {error}; nothing was changed") from None

    def planned(self, endpoint: Endpoint) -> tuple[str | None, str, _Record]:
        """The text of the file, the one that it gets, and what is recorded of the change."""
        now, record = self._text(), self._record()
        before = now if record is None else self._undone(now, record)[0]
        changes = list[_Change]()
        with self._named():
            document = Document(before or "")
            for edit in self.program.edits:
                path, value = as_path(edit.path), filled(edit.value, endpoint.fields)
                n_there, old = document.n_there(path), None
                if n_there == len(path) and (path or before):
                    old = json.dumps(document.value(path))
                changes.append(_Change(list(path), value, old, max(n_there, 0)))
                document = document.put(path, value)
        return now, document.text, _Record(str(self.path), before, document.text, changes)

    def apply(self, text: str, record: _Record) -> None:
        """Write the file, and first the record."""
        self._check_writable()
        for folder in (self.path.parent, self.record_path.parent):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None
        replace_file(str(self.record_path), msgspec.json.encode(record).decode())
        replace_file(str(self.path), text, keep_mode=True)

    def _check_writable(self) -> None:
        if self.path.exists() and not self.path.stat().st_mode & 0o200:
            raise ConfigError(f"{self.path} is read-only; nothing was changed")

    def undo_planned(self) -> tuple[str | None, str | None, Sequence[str]]:
        """The text of the file, the one that it had, and what stays because it was changed since.

        Raises:
            ConfigError: there is nothing to undo, too.
        """
        record = self._record()
        if record is None:
            raise ConfigError(f"launch has changed nothing of {self.program.title}")
        now = self._text()
        return now, *self._undone(now, record)

    def undo(self, text: str | None) -> None:
        """Give the file this text, or remove it, and forget the record."""
        self._check_writable()
        if text is not None:
            replace_file(str(self.path), text, keep_mode=True)
        elif self.path.exists():
            Path(os.path.realpath(self.path)).unlink()
        self.record_path.unlink()

    def _undone(self, now: str | None, record: _Record) -> tuple[str | None, Sequence[str]]:
        if now == record.after:
            return record.before, ()
        if now is None:
            return None, ()
        kept = list[str]()
        with self._named():
            document = Document(now)
        for change in reversed(record.changes):
            path = as_path(change.path)
            if document.n_there(path) < len(path):
                continue
            if document.value(path) != change.after:
                kept.append(named(path) or str(self.path))
            elif change.before is None:
                document = document.remove(path, change.n_there)
            else:
                document = document.put(path, json.loads(change.before))
        is_gone = record.before is None and not document.text.strip("{}[] \t\r\n")
        return None if is_gone else document.text, kept


def difference(path: Path, before: str | None, after: str | None) -> str:
    """Write what changes in a file, without API keys."""
    old, new = (_KEY.sub(r'\1"***"', text or "").splitlines() for text in (before, after))
    lines = difflib.unified_diff(old, new, str(path), str(path), lineterm="")
    return "".join(f"{line}\n" for line in lines)


def shown_key(endpoint: Endpoint) -> str:
    """The key as a message shows it: only that of a server without keys."""
    return NO_KEY if endpoint.api_key == NO_KEY else "KEY"
