"""GGUF files: the parts of a split model, and the header with its metadata and tensors.

Headers are read without llama.cpp, so that looking at a file can neither load a library nor end
the process. No more than the header is read.
"""

from __future__ import annotations

import math
import os.path
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Self

import attrs

from trioserve.errors import ModelLoadError
from trioserve.models.head_families import FILE_WORDS
from trioserve.whole_numbers import whole_number

_MAGIC = b"GGUF"
_FIXED = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of entries
_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_BOOL, _STRING, _ARRAY = 7, 8, 9
#: GGUF's types of numbers and truth values, by their numbers in the file, as `struct` writes them.
_NUMBERS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_WIDTHS = {kind: struct.calcsize(f"<{code}") for kind, code in _NUMBERS.items()}
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32  # of data, if the file sets none

#: Bytes that are read at once, and that a header may have: those of large vocabularies have 20 MB.
_BLOCK = 2**20
_MAX_HEADER = 2**26

#: Limits of a header, by kind. The largest vocabularies have half a million of pairs, and
#: models with many experts 50,000 tensors; other numbers come in lists of one for each layer.
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**18
_MAX_ITEMS = 2**21
_MAX_NUMBERS = 2**16
_MAX_TEXT = 2**22

#: Files that an error names in the place of a missing one.
_MAX_SIMILAR = 3


@attrs.frozen
class Tensor:
    """A tensor of the file: its name, its shape, ggml's number for its type, and where it is.

    `offset` counts from `Header.data_start`.
    """

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int


@attrs.frozen
class _Value:
    """The place of a value, the kind and number of its items, and if it is a list."""

    kind: int
    start: int
    count: int = 1
    is_list: bool = False


class _Bytes:
    """The beginning of a file, read as far as it is needed."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self.data = bytearray()
        self.at = 0

    def take(self, size: int) -> bytes:
        start = self.skip(size)
        return bytes(self.data[start : self.at])

    def skip(self, size: int) -> int:
        """Skip bytes; returns where they begin."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            self._read_to(self.at)
        return start

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.data, self.skip(form.size))[0]
        return value

    def text(self) -> bytes:
        # llama.cpp reads texts as C does: to the first null.
        size = self.number(_LENGTH)
        self.check(size, _MAX_TEXT, "a text", "bytes")
        return self.take(size).partition(b"\0")[0]

    # A vocabulary has hundreds of thousands of texts: the next two loops take the time.

    def texts(self, start: int, count: int) -> list[bytes]:
        """Return texts that were skipped before."""
        found, unpack, size, data = [], _LENGTH.unpack_from, _LENGTH.size, bytes(self.data)
        for _ in range(count):
            at = start + size
            start = at + unpack(data, start)[0]
            found.append(data[at:start])
        if b"\0" in b"".join(found):
            return [text.partition(b"\0")[0] for text in found]
        return found

    def skip_texts(self, count: int) -> None:
        data, at, unpack, size = self.data, self.at, _LENGTH.unpack_from, _LENGTH.size
        for _ in range(count):
            if at + size > len(data):
                self._read_to(at + size)
            at += size + unpack(data, at)[0]
        self.at = at
        self.skip(0)

    def check(self, count: int, most: int, what: str, items: str) -> None:
        """Raise ModelLoadError if something has too many items."""
        if count > most:
            raise self.wrong(f"{what} has {count:,} {items}, more than {most:,}")

    def wrong(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"The model file {self._path} cannot be read: {why}.")

    def _read_to(self, end: int) -> None:
        if end > _MAX_HEADER:
            raise self.wrong(f"its header is larger than {_MAX_HEADER} bytes")
        while len(self.data) < end:
            try:
                more = self._file.read(max(_BLOCK, end - len(self.data)))
            except OSError as error:
                raise self.wrong(error.strerror or str(error)) from error
            if not more:
                raise self.wrong(f"it ends within its header, at {len(self.data)} bytes")
            self.data += more


class Header:
    """The header of a GGUF file: numbers, texts, and the names of its tensors.

    Made by `read`, which closes the file.
    """

    def __init__(self, source: _Bytes) -> None:
        self._source = source
        magic, version, self._n_tensors, n_entries = _FIXED.unpack(source.take(_FIXED.size))
        if magic != _MAGIC:
            raise source.wrong("it is not a GGUF file, for it does not begin with GGUF")
        if not 2 <= version < 2**16:
            raise source.wrong(f"version {version} of GGUF is not supported")
        source.check(n_entries, _MAX_ENTRIES, "its header", "entries")
        source.check(self._n_tensors, _MAX_TENSORS, "its header", "tensors")
        self._values: dict[str, _Value] = {}
        for _ in range(n_entries):
            key = source.text().decode(errors="replace")
            self._values.setdefault(key, self._pass_value())  # llama.cpp finds the first
        self._tensors_at = source.at

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def tensors(self) -> Iterator[Tensor]:
        """Read the list of the tensors.

        Raises:
            ModelLoadError: it is damaged.
        """
        source = self._source
        source.at = self._tensors_at
        for _ in range(self._n_tensors):
            name = source.text()
            n_dimensions = source.number(_KIND)
            if n_dimensions > _MAX_DIMENSIONS:
                raise source.wrong(f"a tensor has {n_dimensions} dimensions")
            shape = tuple(source.number(_LENGTH) for _ in range(n_dimensions))
            yield Tensor(name, shape, source.number(_KIND), source.number(_LENGTH))

    def data_start(self) -> int:
        """Find where the data of the tensors begin in the file; raises as `tensors`."""
        for _ in self.tensors():
            pass
        alignment = self.whole("general.alignment") or _ALIGNMENT
        return -(-self._source.at // alignment) * alignment

    def has_tensor(self, names: Sequence[bytes]) -> bool:
        """Return True if the file has one of these tensors."""
        return any(one.name in names for one in self.tensors())

    def text(self, key: str) -> str:
        """Return a text; empty if it is missing."""
        value = self._values.get(key)
        if value is None or value.is_list or value.kind != _STRING:
            return ""
        self._source.at = value.start
        return self._source.text().decode(errors="replace")

    def numbers(self, key: str) -> list[float]:
        """Return a number, or a list of numbers; empty if the key has neither.

        What is true is 1, and what is false 0.
        """
        value = self._values.get(key)
        if value is None or value.kind not in _NUMBERS:
            return []
        self._source.check(value.count, _MAX_NUMBERS, key, "numbers")
        form = f"<{value.count}{_NUMBERS[value.kind]}"
        return list(struct.unpack_from(form, self._source.data, value.start))

    def number(self, key: str) -> float | None:
        """Return the number, or of a list of numbers the largest one; None if it is missing."""
        return max(self.numbers(key), default=None)

    def whole(self, key: str) -> int:
        """Return the number without its fraction; 0 if it is missing or not finite."""
        value = self.number(key)
        return int(value) if value is not None and math.isfinite(value) else 0

    def flag(self, key: str) -> bool:
        """Return whether something is so; false if the file does not say."""
        value = self._values.get(key)
        return value is not None and value.kind == _BOOL and self._source.data[value.start] != 0

    def count(self, key: str) -> int:
        """Return the number of items of a list; 0 if it is missing."""
        value = self._values.get(key)
        return value.count if value is not None and value.is_list else 0

    def texts(self, key: str) -> list[bytes] | None:
        """Return a list of texts; None if it is missing."""
        value = self._values.get(key)
        if value is None or not value.is_list or value.kind != _STRING:
            return None
        return self._source.texts(value.start, value.count)

    def _pass_value(self) -> _Value:
        source = self._source
        kind, count, is_list = source.number(_KIND), 1, False
        if kind == _ARRAY:
            kind, count, is_list = source.number(_KIND), source.number(_LENGTH), True
            source.check(count, _MAX_ITEMS, "a list", "items")
        value = _Value(kind, source.at, count, is_list)
        if kind == _STRING:
            source.skip_texts(count)
        elif kind in _WIDTHS:
            source.skip(_WIDTHS[kind] * count)
        else:
            raise source.wrong(f"it has a value of the unknown type {kind}")
        return value


@contextmanager
def read(path: Path) -> Iterator[Header]:
    """Read the header of a file.

    Raises:
        ModelLoadError: it is not there, or no GGUF file, or its header is damaged.
    """
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelLoadError(f"The model file {path} cannot be read: {why}.") from error
    with file:
        yield Header(_Bytes(file, path))


def check_file(path: Path) -> None:
    """Check that a file exists, can be read, and begins as a GGUF does.

    Raises:
        ModelLoadError: it does not; the message is one sentence that names the problem.
    """
    try:
        if path.is_dir():
            raise ModelLoadError(f"The model file {path} is a directory.")
        with path.open("rb") as file:
            head = file.read(_FIXED.size)
    except FileNotFoundError as error:
        raise ModelLoadError(f"No such file: {path}{_similar_files(path)}.") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelLoadError(f"The model file {path} cannot be read: {why}.") from error
    if not head:
        raise ModelLoadError(f"The model file {path} is empty.")
    if head[:4] != _MAGIC[: len(head)]:
        raise ModelLoadError(
            f"The model file {path} is not a GGUF file: it does not begin with GGUF."
        )
    if len(head) < _FIXED.size:
        raise ModelLoadError(f"The model file {path} is cut short: it has {len(head)} bytes.")
    version = _FIXED.unpack(head)[1]
    if version >= 2**16:
        raise ModelLoadError(f"The model file {path} was written for big-endian machines.")
    if version < 2:
        raise ModelLoadError(
            f"The model file {path} has version {version} of GGUF, which is too old; convert it."
        )


def _similar_files(path: Path) -> str:
    """Name the GGUF files whose names are like that of a missing one, and else those beside it."""
    try:
        there = sorted(one.name for one in path.parent.iterdir() if one.suffix == ".gguf")
    except OSError:
        return f"; there is no folder {path.parent}"
    names = get_close_matches(path.name, there, _MAX_SIMILAR, cutoff=0.75) or there[:_MAX_SIMILAR]
    return f"; there is {', '.join(str(path.parent / name) for name in names)}" if names else ""


#: GGUF files that are not models by themselves.
_BESIDE_MODELS = ("mmproj", "imatrix", *FILE_WORDS.values())

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL | re.IGNORECASE)
_QUANT = re.compile(r"[-.]([A-Z0-9_]+)$", re.ASCII | re.IGNORECASE)


@attrs.frozen
class GgufName:
    """The properties in the name of a GGUF file. A file that is not split is part 1 of 1."""

    stem: str  # with its folders, without the number of the part
    part: int
    n_parts: int
    suffix: str = ".gguf"  # in any case

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Take a path apart; None if it is not a GGUF file."""
        stem, suffix = os.path.splitext(path)
        if suffix.lower() != ".gguf":
            return None
        match = _PART.fullmatch(stem)
        if match is None:
            return cls(stem, 1, 1, suffix)
        return cls(match[1], int(match[2]), int(match[3]), suffix)

    @classmethod
    def parts_of(cls, path: str) -> tuple[str, ...]:
        """The paths of all parts of a model, in their order, for that of one of them."""
        name = cls.read(path)
        if name is None or name.n_parts == 1:
            return (path,)
        count = name.n_parts
        return tuple(
            f"{name.stem}-{part:05}-of-{count:05}{name.suffix}" for part in range(1, count + 1)
        )

    @property
    def quant(self) -> str | None:
        """The last word of the name, which is the quantization in the names of most files."""
        match = _QUANT.search(self.stem)
        return match and match[1].upper()

    @property
    def bits(self) -> int:
        """The bits of a weight, from the name; 0 if it does not contain them."""
        digits = re.search(r"\d+", self.quant or "")
        return (digits and whole_number(digits[0])) or 0

    @property
    def is_model(self) -> bool:
        """True if the file is a model, or its first part."""
        name = os.path.basename(self.stem)
        return self.part == 1 and not any(word in name for word in _BESIDE_MODELS)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all files of a model by one of them, whether they exist or not."""
    return tuple(map(Path, GgufName.parts_of(str(path))))


def has_tensor(path: Path, *names: bytes) -> bool:
    """True if the files of a model have one of these tensors.

    Raises:
        ModelLoadError: one of them cannot be read.
    """
    for part in parts_of(path):
        with read(part) as header:
            if header.has_tensor(names):
                return True
    return False


def total_size(files: Iterable[Path]) -> int:
    """Add up the sizes of the files; one that is missing counts as 0."""
    total = 0
    for path in files:
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def version_of(path: Path) -> tuple[int, ...]:
    """Return size, times, inode and device of a file, which tell it from another; () without it."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev
