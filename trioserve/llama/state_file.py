"""Files with the state of one sequence, in llama.cpp's format with llama-server's list of tokens.

::

    magic, version, n | n words: -1, 1, count, tokens ..., 0 | state | JSON, its length, CRC, mark

llama-server and trioserve read each other's files. llama-server ignores the part after the state:
our JSON, which names the LoRA adapters that the state was computed with and has digests of the
text's owner (`CacheRoot`), and a checksum of all bytes before it. Files without a checksum are from
llama-server.

A text with media has a different list, which only trioserve reads, because llama-server names media
differently. Its version is a mark of trioserve's, a media cell is -1, and the chunks follow::

    -1, mark, count, tokens ... | n | n chunks: first cell, cells, positions, 4 words of a digest

The JSON then names the projector that encoded the media.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from trioserve.errors import InvalidRequestError, PermissionDeniedError
from trioserve.types import AdapterInfo, Adapters, CacheRoot, CellKey, SlotState
from trioserve.types.media import ChunkOutline

_HEAD = struct.Struct("<III")
_MAGIC, _VERSION = 0x67677371, 3
_LIST = struct.Struct("<iII")  # -1, which is no token; the version of the list; its length
_LIST_VERSION = 1
_MEDIA_VERSION = 0x6F697274
_CHUNK = struct.Struct("<III16s")  # a `ChunkOutline`, after its first cell
_TAIL = struct.Struct("<II8s")  # bytes of JSON before it, the checksum, and a mark
_MARK = b"trio+crc"
_UNCHECKED = 12  # bytes at the end: the checksum, and the mark

#: Bytes of JSON that are looked at before a file is replaced.
_LONGEST_NOTE = 2**20

#: Bytes that a state in memory begins with and a file leaves out: llama.cpp's mark, the sequence.
PREFIX = 8


def write(
    path: Path, saved: SlotState, adapters: Sequence[AdapterInfo], *, projector: str = ""
) -> int:
    """Write a file, whole or not at all, and return its size.

    Args:
        path: of the file.
        saved: what to write.
        adapters: the loaded ones.
        projector: the fingerprint of the projector, if there is one.

    Raises:
        PermissionDeniedError: it would replace a file of another owner.
        OSError: it cannot be written.
    """
    if _owner_of(path) not in ("", saved.root.owner):
        raise PermissionDeniedError("There is a file of that name, of another API key.")
    words, has_media = _words(saved.keys)
    used = [[Path(adapters[id_].path).name, scale] for id_, scale in saved.root.adapters]
    fields = {"lora": used, "owner": saved.root.owner, "salt": saved.root.salt}
    note = json.dumps(fields | ({"projector": projector} if has_media else {})).encode()
    state = memoryview(saved.state)[PREFIX:]
    head = _HEAD.pack(_MAGIC, _VERSION, len(words) // 4)
    checksum = 0
    for part in (head, words, state, note, len(note).to_bytes(4, "little")):
        checksum = zlib.crc32(part, checksum)
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(head + words)
            file.write(state)
            file.write(note + _TAIL.pack(len(note), checksum, _MARK))
            size = file.tell()
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return size


def _owner_of(path: Path) -> str:
    """Read the owner of a file's text; empty if it is not given, or the file is missing."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL.size))
            length, _, mark = _TAIL.unpack(file.read().rjust(_TAIL.size, b"\0"))
            if mark != _MARK or length > min(size - _TAIL.size, _LONGEST_NOTE):
                return ""
            file.seek(-_TAIL.size - length, os.SEEK_END)
            note = json.loads(file.read(length))
    except (FileNotFoundError, ValueError):
        return ""
    match note:
        case {"owner": str(owner)}:
            return owner
    return ""


def read(
    path: Path,
    prefix: bytes,
    loaded: Sequence[AdapterInfo],
    default: Adapters,
    max_tokens: int,
    *,
    projector: str | None = None,
) -> tuple[SlotState, int]:
    """Read a file; returns its state and its size.

    Args:
        path: of the file.
        prefix: the first bytes of a state in memory.
        loaded: the adapters that are loaded.
        default: the adapters of a file that names none. Such a file has no owner.
        max_tokens: how many tokens a sequence may hold.
        projector: the fingerprint of the projector; None: the model has none.

    Raises:
        InvalidRequestError: it is no such file, is damaged, has too many tokens, or was computed
            with adapters that are not loaded, or with another projector.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise _refusal("is cut short")
        magic, version, n_words = _HEAD.unpack(head)
        if (magic, version) != (_MAGIC, _VERSION):
            raise _refusal("is not the state of a slot")
        if _HEAD.size + 4 * n_words > size:
            raise _refusal("is cut short")
        if n_words > max(0, max_tokens) * (1 + _CHUNK.size // 4) + 8:
            raise _refusal(f"holds more than the {max_tokens} tokens of a context")
        words = file.read(4 * n_words)
        state = bytearray(prefix)
        state += file.read()
    keys, has_media = _keys(words)
    note = _take_note(state, _checksums(head, words, keys))
    if len(keys) > max_tokens:
        raise _refusal(f"holds more than the {max_tokens} tokens of a context")
    if has_media:
        _check_projector(note, projector)
    root = CacheRoot(default) if note is None else _root(note, loaded)
    return SlotState(keys=keys, root=root, state=bytes(state)), size


def _checksums(head: bytes, words: bytes, keys: Sequence[CellKey]) -> list[int]:
    """The checksums that the beginning of a file may have.

    Old servers wrote the tokens alone. A file whose list was replaced by such a one has the
    checksum of the list that trioserve wrote.
    """
    found = [zlib.crc32(words, zlib.crc32(head))]
    if not words.startswith(b"\xff\xff\xff\xff"):
        ours, _ = _words(keys)
        found.append(zlib.crc32(ours, zlib.crc32(_HEAD.pack(_MAGIC, _VERSION, len(ours) // 4))))
    return found


def _words(keys: Sequence[CellKey]) -> tuple[bytes, bool]:
    """Write the list of a text; returns whether it has media."""
    chunks: list[bytes] = []
    end = 0
    for cell, key in enumerate(keys):
        if key < 0 and cell >= end:
            one = ChunkOutline.of(key)
            chunks.append(_CHUNK.pack(cell, one.n_cells, one.n_positions, one.digest))
            end = cell + one.n_cells
    version = _MEDIA_VERSION if chunks else _LIST_VERSION
    tokens = array("i", [max(key, -1) for key in keys]).tobytes()
    count = len(chunks).to_bytes(4, "little")
    words = b"".join((_LIST.pack(-1, version, len(keys)), tokens, count, *chunks))
    return words, bool(chunks)


def _keys(words: bytes) -> tuple[tuple[CellKey, ...], bool]:
    """Read the list of a text, which old servers wrote without a header; see `_words`."""
    values = array("i", words).tolist()
    if not values or values[0] != -1:
        return _checked(values), False
    if len(values) < 4 or not 0 <= values[2] <= len(values) - 4:
        raise _refusal("is damaged: its list of tokens has no end")
    keys, end = values[3 : 3 + values[2]], 3 + values[2]
    version, n_chunks, rest = values[1], values[end], words[4 * end + 4 :]
    if version not in (_LIST_VERSION, _MEDIA_VERSION):
        raise _refusal("was written by another version")
    if version == _LIST_VERSION and n_chunks:
        raise _refusal(
            "is from llama-server and has media in it, which it identifies in its own way"
        )
    if len(rest) != n_chunks * _CHUNK.size:
        raise _refusal("is damaged: its list of media has no end")
    for cell, n_cells, n_positions, digest in _CHUNK.iter_unpack(rest):
        place = slice(cell, cell + n_cells)
        fits = 0 < n_cells <= len(keys) - cell and 0 < n_positions <= n_cells
        if not fits or keys[place] != [-1] * n_cells:
            raise _refusal("is damaged: its media are not where they should be")
        keys[place] = ChunkOutline(digest, n_cells, n_positions).keys
    return _checked(keys), bool(n_chunks)


def _checked(keys: list[CellKey]) -> tuple[CellKey, ...]:
    """Refuse numbers that stand for nothing: they are too small for tokens, too large for media."""
    if any(-(2**31) <= key < 0 for key in keys):
        raise _refusal("is damaged: it has tokens below 0")
    return tuple(keys)


def _check_projector(note: object, projector: str | None) -> None:
    if projector is None:
        raise InvalidRequestError(
            "Unable to restore slot: Cannot restore media tokens without an mmproj.",
            param="filename",
        )
    match note:
        case {"projector": str(its)} if its == projector:
            return
    raise _refusal("has media in it that were encoded with another projector")


def _take_note(state: bytearray, checksums: Sequence[int]) -> object:
    """Cut off the JSON that trioserve wrote after the state, and read it; None if it is missing.

    `checksums` are those that what comes before the state may have.
    """
    mark = bytes(state[-len(_MARK) :])
    # It may have a damaged byte or two.
    is_ours = sum(a == b for a, b in zip(mark, _MARK, strict=False)) >= len(_MARK) - 2
    if not is_ours or len(state) < PREFIX + _TAIL.size:
        return None
    length, expected, _ = _TAIL.unpack_from(state, len(state) - _TAIL.size)
    with memoryview(state) as view:
        rest = view[PREFIX:-_UNCHECKED]
        is_whole = any(zlib.crc32(rest, before) == expected for before in checksums)
        rest.release()
    if mark != _MARK or not is_whole:
        raise _refusal("is damaged: its checksum is wrong")
    start = len(state) - _TAIL.size - length
    try:
        if start < PREFIX:
            raise ValueError
        note: object = json.loads(state[start : -_TAIL.size])
    except ValueError:
        raise _refusal("is damaged at its end") from None
    del state[start:]
    return note


def _root(note: object, loaded: Sequence[AdapterInfo]) -> CacheRoot:
    match note:
        case {"owner": str(owner), "salt": str(salt)}:
            return CacheRoot(_adapters(note, loaded), owner, salt)
    raise _refusal("is damaged at its end")


def _adapters(note: object, loaded: Sequence[AdapterInfo]) -> Adapters:
    ids = {Path(one.path).name: id_ for id_, one in enumerate(loaded) if one.path}
    match note:
        case {"lora": [*pairs]}:
            found = []
            for pair in pairs:
                match pair:
                    case [str(name), float() | int() as scale] if name in ids:
                        found.append((ids[name], float(scale)))
                    case _:
                        raise _refusal(f"was computed with the adapter {pair}, which is not loaded")
            return tuple(sorted(found))
    raise _refusal("is damaged at its end")


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Unable to restore slot: the file {why}.", param="filename")
