"""States on disk that left RAM: found by hashes of their keys, read and written by two threads."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from errno import EDQUOT, ENOSPC
from pathlib import Path
from time import monotonic, time_ns
from typing import TypeAlias

import attrs

from trioserve.engine.cache.ram_cache import CachedState
from trioserve.engine.cache.state_files import (
    DamagedFileError,
    StateFolder,
    StateHead,
    WriteEndedError,
    pack_keys,
)
from trioserve.engine.helpers import start_all
from trioserve.log import get_logger
from trioserve.types import CacheRoot, CellKey

_log = get_logger("trioserve")

#: Keys that are hashed together. What two texts share is known to be this much, or more.
BLOCK = 64

#: Shorter texts are not written.
SHORT = 32

#: Bytes of states that wait to be written. Further ones are not written.
MAX_WAITING = 2**28

#: Seconds after which writing is tried again when the disk was full.
RETRY_S = 60.0

#: Seconds that the writing may take when the engine ends.
EXIT_S = 10.0

#: Seconds per byte that reading is taken to cost until it was measured.
FIRST_COST = 1 / 500e6

#: Nanoseconds: a folder that changes again this soon may keep its time.
_TICK_NS = 50_000_000

#: The things that states depend on: the model with its settings, and each LoRA adapter.
Identity: TypeAlias = tuple[str, tuple[str, ...]]

#: Whether to read a number of keys, in a number of seconds.
Pays: TypeAlias = Callable[[int, float], bool]

#: Gets what was read, in the thread that has read it.
Done: TypeAlias = Callable[[list[CachedState]], object]


@attrs.frozen(eq=False)
class _Entry:
    """A file, by the hashes of its keys."""

    name: str
    size: int
    n_keys: int
    is_checkpoint: bool
    path: tuple[bytes, ...]  # of the root, and of its keys up to the end of each block
    end: bytes  # of all keys


@attrs.frozen
class Found:
    """The length of a text that can start from files, and the files to read for that."""

    n_keys: int = 0
    entries: tuple[_Entry, ...] = ()

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def _next(digest: bytes, keys: Sequence[CellKey]) -> bytes:
    return hashlib.blake2b(pack_keys(keys), key=digest, digest_size=16).digest()


def _hashes(root: bytes, keys: Sequence[CellKey]) -> Iterator[bytes]:
    """Hash a text from the root on, up to the end of each block."""
    digest = root
    yield digest
    for start in range(0, len(keys) - BLOCK + 1, BLOCK):
        digest = _next(digest, keys[start : start + BLOCK])
        yield digest


class Index:
    """Finds the files that hold a beginning of a text.

    ::

        | block | block | block | rest |     a hash for each block, and for the end
          └ a hash includes those before it, and the root
    """

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        #: By the hash of a block: the sequences that have it, and all that end in the next one.
        self._through: defaultdict[bytes, set[str]] = defaultdict(set)
        self._ending: defaultdict[bytes, set[str]] = defaultdict(set)

    def add(self, head: StateHead) -> None:
        path = tuple(_hashes(head.root, head.keys))
        end = _next(path[-1], head.keys[BLOCK * (len(path) - 1) :])
        self.entries[head.name] = entry = _Entry(
            head.name, head.size, len(head.keys), head.is_checkpoint, path, end
        )
        self._ending[path[-1]].add(entry.name)
        if not entry.is_checkpoint:
            for digest in path[1:]:
                self._through[digest].add(entry.name)

    def drop(self, name: str) -> None:
        """Forget a file, if it is known."""
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        for digests, holders in ((entry.path[1:], self._through), (entry.path[-1:], self._ending)):
            for digest in digests:
                holders[digest].discard(name)
                if not holders[digest]:
                    del holders[digest]

    def beginnings(self, root: bytes, keys: Sequence[CellKey]) -> list[_Entry]:
        """Find the files that are a beginning of a text from end to end, the longest one last."""
        found = []
        for i, digest in enumerate(_hashes(root, keys)):
            ends: dict[int, bytes] = {}
            for entry in map(self.entries.__getitem__, self._ending.get(digest, ())):
                n_keys = entry.n_keys
                if n_keys > len(keys):
                    continue
                rest = keys[i * BLOCK : n_keys]
                if ends.setdefault(n_keys, _next(digest, rest)) == entry.end:
                    found.append(entry)
        return sorted(found, key=lambda entry: entry.n_keys)

    def carriers(self, root: bytes, keys: Sequence[CellKey]) -> tuple[int, list[_Entry]]:
        """Find the longest beginning in whole blocks that sequences have, and these."""
        best: tuple[int, list[_Entry]] = 0, []
        for i, digest in enumerate(_hashes(root, keys)):
            if names := self._through.get(digest):
                best = i * BLOCK, [self.entries[name] for name in names]
            elif i:
                break
        return best


class DiskCache:
    """Writes states to files, and reads them when a prompt begins like them.

    Two threads work for the inference thread, which uses all other methods.

    Args:
        base: the folder; other processes may share it.
        limit: bytes that all files in it may take.
        identify: returns what the states depend on; it may be slow.
        cuttable: the most keys of a sequence that can be cut anywhere after it was read.
    """

    def __init__(
        self, base: Path, limit: int, identify: Callable[[], Identity], *, cuttable: int
    ) -> None:
        self._base, self._limit, self._identify = base, limit, identify
        self._cuttable = cuttable
        self._lock = threading.Lock()  # for the index
        self._index = Index()
        self._folder: StateFolder | None = None
        self._adapters: tuple[str, ...] = ()
        self._seen = 0  # what `StateFolder.changed` returned when the index was last brought up
        self._ready = threading.Event()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cache-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cache-writer")
        self._n_waiting = self._waiting = 0  # states to be written, and their bytes
        self._pause_until = 0.0
        self._deadline: float | None = None
        self._cost = FIRST_COST
        self._n_read = self._n_written = 0  # bytes

    # -- its threads

    def start(self) -> None:
        """Start the threads. Raises ModelLoadError: the system refuses one."""
        start_all(self._reader, 1)
        start_all(self._writer, 1)
        self._submit(self._reader, self._open)

    def counters(self) -> dict[str, int]:
        """Return the fields of `EngineCounters` for the disk."""
        return {
            "disk_bytes": self._folder.size if self._folder is not None else 0,
            "disk_read_bytes": self._n_read,
            "disk_written_bytes": self._n_written,
        }

    def close(self) -> None:
        """End the threads, after `EXIT_S` of writing what waits."""
        self.begin_exit()
        self._reader.shutdown(cancel_futures=True)
        self._ready.set()  # if `_open` was cancelled
        self._writer.shutdown()

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., object], *args: object) -> None:
        pool.submit(work, *args).add_done_callback(_report)

    def begin_exit(self) -> None:
        """Limit the time for all that is still to be written."""
        if self._deadline is None:
            self._deadline = monotonic() + EXIT_S

    @property
    def is_over(self) -> bool:
        """True when there is no more time for writing."""
        return self._deadline is not None and monotonic() > self._deadline

    def _open(self) -> None:
        try:
            identity, self._adapters = self._identify()
            folder = StateFolder(self._base, identity, self._limit)
            folder.open()
            self._folder = folder
            with self._lock:
                self._update(folder)
        except OSError as error:
            self._folder = None
            _log.warning("there is no cache on disk", reason=str(error))
        finally:
            self._ready.set()

    def _update(self, folder: StateFolder) -> None:
        changed = folder.changed()
        if changed == self._seen:
            return
        names = folder.names()
        for name in self._index.entries.keys() - names:
            self._index.drop(name)
        for name in names - self._index.entries.keys():
            try:
                self._index.add(folder.head(name))
            except DamagedFileError:
                self._remove_damaged(folder, name)
            except OSError:
                continue  # another process has removed it
        # A file that comes within the same tick of the clock would be missed.
        self._seen = changed if time_ns() - changed > _TICK_NS else 0

    def _remove_damaged(self, folder: StateFolder, name: str) -> None:
        _log.warning("a file of the cache is damaged, and removed", file=name)
        folder.remove(name)
        self._index.drop(name)

    def _is_kept(self, root: CacheRoot) -> bool:
        """True if texts are kept: none with adapters that were loaded since the start."""
        return all(id_ < len(self._adapters) for id_, _ in root.adapters)

    def _root(self, root: CacheRoot) -> bytes:
        """Make a digest of what a text must have in common with the one of a file."""
        used = [[self._adapters[id_], scale] for id_, scale in root.adapters]
        data = json.dumps([used, root.owner, root.salt]).encode()
        return hashlib.blake2b(data, digest_size=16).digest()

    # -- reading

    def fetch(
        self, keys: list[CellKey], root: CacheRoot, *, n_held: int, pays: Pays, done: Done
    ) -> bool:
        """Read what a prompt can start from, if `pays` says that this is worth it.

        Args:
            keys: of the prompt.
            root: its root.
            n_held: how many of the keys a sequence in the KV cache or in RAM begins with.
            pays: gets the number of keys to start from, and the seconds that reading takes.
            done: called with the result, in another thread, if this returns True.
        """
        if not self._ready.is_set():
            self._submit(self._reader, self._fetch_later, keys, root, n_held, pays, done)
            return True
        found = self._find(keys, root, n_held)
        if not self._is_worth(found, pays):
            return False
        self._submit(self._reader, self._read, found, root, done)
        return True

    def _fetch_later(
        self, keys: list[CellKey], root: CacheRoot, n_held: int, pays: Pays, done: Done
    ) -> None:
        found = Found()
        try:
            best = self._find(keys, root, n_held)
            found = best if self._is_worth(best, pays) else found
        finally:
            self._read(found, root, done)

    def _is_worth(self, found: Found, pays: Pays) -> bool:
        if not found.entries:
            return False
        if pays(found.n_keys, found.size * self._cost):
            return True
        self._cost *= 0.95  # so that it is measured again
        return False

    def _find(self, keys: list[CellKey], root: CacheRoot, n_held: int) -> Found:
        folder = self._folder
        if folder is None or not self._is_kept(root):
            return Found()
        digest = self._root(root)
        with self._lock:
            try:
                self._update(folder)
            except OSError:
                return Found()  # the folder is gone
            whole = self._index.beginnings(digest, keys)
            n_shared, carriers = self._index.carriers(digest, keys)
        sequences = [entry for entry in whole if not entry.is_checkpoint]
        best = Found(sequences[-1].n_keys, (sequences[-1],)) if sequences else Found()
        short = [entry for entry in carriers if entry.n_keys <= self._cuttable]
        if short and n_shared > best.n_keys:
            best = Found(n_shared, (min(short, key=lambda entry: entry.size),))
        for checkpoint in reversed(whole):
            if not checkpoint.is_checkpoint or checkpoint.n_keys <= best.n_keys:
                continue
            if n_held >= checkpoint.n_keys:
                return Found(checkpoint.n_keys, (checkpoint,))
            if (carrier := self._carrier(folder, digest, keys[: checkpoint.n_keys])) is not None:
                return Found(checkpoint.n_keys, (carrier, checkpoint))
        return best

    def _carrier(self, folder: StateFolder, root: bytes, keys: list[CellKey]) -> _Entry | None:
        """Find a sequence that begins with all of `keys`."""
        with self._lock:
            n_shared, carriers = self._index.carriers(root, keys)
        if n_shared < len(keys) // BLOCK * BLOCK or not n_shared:
            return None
        for entry in sorted(carriers, key=lambda entry: entry.size):
            try:
                if list(folder.head(entry.name).keys[: len(keys)]) == keys:
                    return entry
            except (DamagedFileError, OSError):
                continue  # `_read` and `_update` remove it
        return None

    def _read(self, found: Found, root: CacheRoot, done: Done) -> None:
        states: list[CachedState] = []
        try:
            states = self._states(found, root)
        finally:
            done(states)

    def _states(self, found: Found, root: CacheRoot) -> list[CachedState]:
        """Read files, all or none."""
        folder, states = self._folder, []
        began = monotonic()
        for entry in found.entries:
            assert folder is not None
            try:
                head, state = folder.read(entry.name)
            except DamagedFileError:
                with self._lock:
                    self._remove_damaged(folder, entry.name)
                break
            except OSError as error:
                _log.info("a file of the cache cannot be read", reason=str(error))
                with self._lock:
                    self._index.drop(entry.name)
                break
            states.append(
                CachedState(list(head.keys), root, state, head.is_checkpoint, from_disk=True)
            )
        n_bytes = sum(len(one.state) for one in states)
        if n_bytes:
            self._cost += 0.5 * ((monotonic() - began) / n_bytes - self._cost)
            self._n_read += n_bytes
        return states if len(states) == len(found.entries) else []

    # -- writing

    def put(self, entry: CachedState, *, wait: bool = False) -> None:
        """Write a state, unless it is there, too many wait, or the disk was full a moment ago.

        With `wait`, block until fewer wait.
        """
        if len(entry.keys) < SHORT or self.is_paused or self.is_over:
            return
        if wait:
            self._ready.wait(EXIT_S)  # or `close` would cancel what it waits for
            self._writer.submit(lambda: None).result()
        size = len(entry.state)
        with self._lock:
            if self._n_waiting and self._waiting + size > MAX_WAITING:
                return
            self._n_waiting += 1
            self._waiting += size
        self._submit(self._writer, self._write, entry)

    @property
    def is_busy(self) -> bool:
        """True while something is being written, or the folder is not open yet."""
        return self._n_waiting > 0 or not self._ready.is_set()

    @property
    def is_paused(self) -> bool:
        """True while the disk was full a moment ago."""
        return monotonic() < self._pause_until

    def lacks(self, keys: list[CellKey], root: CacheRoot) -> bool:
        """True if more than a little of a sequence is not on disk, nor about to be."""
        folder = self._folder
        if folder is None or not self._is_kept(root):
            return False
        digest = self._root(root)
        with self._lock:
            whole = [one for one in self._index.beginnings(digest, keys) if not one.is_checkpoint]
            n_shared = self._index.carriers(digest, keys)[0] if self._cuttable else 0
        n_held = max(n_shared, whole[-1].n_keys if whole else 0)
        return len(keys) - n_held >= max(SHORT, len(keys) // 16)

    def has(self, entry: CachedState) -> bool:
        """True if a state is on disk, or cannot be."""
        if self._folder is None or not self._is_kept(entry.root):
            return True
        name = StateHead(self._root(entry.root), entry.keys, entry.is_checkpoint).name
        with self._lock:
            return name in self._index.entries or len(entry.keys) < SHORT

    def _write(self, entry: CachedState) -> None:
        try:
            while not self._ready.wait(1.0) and not self.is_over:
                pass
            if self._folder is not None and not self.is_over and self._is_kept(entry.root):
                self._write_to(self._folder, entry)
        finally:
            with self._lock:
                self._n_waiting -= 1
                self._waiting -= len(entry.state)

    def _write_to(self, folder: StateFolder, entry: CachedState) -> None:
        head = StateHead(self._root(entry.root), entry.keys, entry.is_checkpoint)
        with self._lock:
            is_known = head.name in self._index.entries
        if is_known:
            folder.touch(head.name)
            return
        try:
            size = folder.write(head, entry.state, lambda: self.is_over)
        except WriteEndedError:
            return
        except OSError as error:
            why = "the disk is full" if error.errno in (ENOSPC, EDQUOT) else str(error)
            _log.warning("the cache on disk is not written for a while", reason=why)
            self._pause_until = monotonic() + RETRY_S
            return
        self._n_written += size
        with self._lock:
            replaced = self._index.beginnings(head.root, head.keys)
            self._index.add(attrs.evolve(head, size=size))
            for old in replaced if not head.is_checkpoint else ():
                if not old.is_checkpoint and old.n_keys < len(head.keys):
                    folder.remove(old.name)
                    self._index.drop(old.name)

    def erase(self, keys: list[CellKey], root: CacheRoot) -> None:
        """Remove a text, and what it continues."""
        folder = self._folder
        if folder is None or not self._is_kept(root):
            return
        digest = self._root(root)
        with self._lock:
            n_shared, carriers = self._index.carriers(digest, keys)
            gone = self._index.beginnings(digest, keys)
            if n_shared and n_shared == len(keys) // BLOCK * BLOCK:
                gone += carriers
            for entry in gone:
                folder.remove(entry.name)
                self._index.drop(entry.name)


def _report(future: Future[object]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.error("the cache on disk has failed", exc_info=error)
