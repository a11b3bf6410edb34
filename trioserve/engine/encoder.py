"""`MediaEncoder`: turns images and sound into embeddings, beside the inference thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import attrs

from trioserve.engine.backend import Embeddings, Projector
from trioserve.engine.helpers import start
from trioserve.errors import EncodeError, EncodeInterruptedError, TrioServeError
from trioserve.log import get_logger
from trioserve.types import MediaChunk

_log = get_logger("trioserve.engine")

#: Bytes of embeddings that are kept: those of about a hundred images, with most models.
DEFAULT_MEDIA_CACHE = 256 << 20

#: Seconds that a thread is expected to take for a cell, until that has been measured.
FIRST_WORK = 0.005


@attrs.frozen
class Encoded:
    """A chunk was encoded, or could not be."""

    chunk: MediaChunk
    error: TrioServeError | None


@attrs.frozen
class _Job:
    """A chunk of media that is being encoded."""

    chunk: MediaChunk
    threads: int
    begin: float  # monotonic
    work: float  # seconds that one thread would take, estimated

    def is_slow(self, count: int) -> bool:
        """True if it would end sooner if it began again with `count` threads."""
        elapsed = monotonic() - self.begin
        return self.work / count < self.work / self.threads - elapsed


class MediaReader(Protocol):
    """Computes the cells of texts one after the other: a slot, or a request for embeddings."""

    #: Its next cell is of a chunk that is not encoded yet.
    awaits_media: bool

    def media_now(self) -> MediaChunk | None:
        """Return the chunk that its next cell is of, unless that is a token."""

    def media_ahead(self) -> list[MediaChunk]:
        """List the chunks that are not computed whole, in their order."""


def needs(reader: MediaReader, chunk: MediaChunk) -> bool:
    """True if a reader has yet to get to a chunk, or one like it."""
    return any(one.id == chunk.id for one in reader.media_ahead())


class MediaEncoder:
    """Encodes the media that requests need, one chunk at a time, in a separate thread.

    Requests take turns. A chunk is encoded once for all that need it, and its embeddings are kept
    as long as there is room. An encoding that no request needs any more is interrupted. If it had
    not yet begun and missed the interrupt, the next step interrupts it.

    Args:
        projector: encodes.
        done: called, from the encoder's thread, when a chunk is encoded, or cannot be.
    """

    #: It has a thread. Without one, the caller runs `encode_next`.
    has_thread = True

    def __init__(self, projector: Projector, done: Callable[[Encoded], None]) -> None:
        self._projector = projector
        #: Bytes of embeddings that are kept. Those that requests need next are always kept.
        self.limit = DEFAULT_MEDIA_CACHE
        self._done = done
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self._closed = False
        # By the id of the request: the chunks that it has not decoded yet, in their order.
        self._wishes: Mapping[int, Sequence[MediaChunk]] = {}
        self._wanted: set[str] = set()  # the ids of all of these
        self._job: _Job | None = None
        self._failed: set[str] = set()  # they are not tried again before `settle`
        self._served: dict[int, int] = {}  # by request: the turn in which it was served last
        self._turn = 0
        #: Those that were set; 0: none yet.
        self.threads = 0
        self._encoded: OrderedDict[str, Embeddings] = OrderedDict()  # the one used last last
        self._size = 0
        self._raised = ""  # the id of the last chunk that has begun again with more threads
        self._work_per_cell = FIRST_WORK  # seconds that it takes a thread, of the last chunk
        self._n_encoded, self._seconds = 0, 0.0
        #: Something is being encoded, or about to be. Each step asks that.
        self.is_busy = False

    # -- from the inference thread

    def serve(self, readers: Mapping[int, MediaReader]) -> None:
        """Encode what readers, by their requests, have ahead, and mark those that wait for it."""
        self.want({id_: ahead for id_, one in readers.items() if (ahead := one.media_ahead())})
        for one in readers.values():
            chunk = one.media_now()
            one.awaits_media = chunk is not None and self.get(chunk) is None

    def want(self, wishes: Mapping[int, Sequence[MediaChunk]]) -> None:
        """Encode the chunks that requests have not decoded yet, in the order of each request.

        An encoding of a chunk that is no longer wanted is interrupted.
        """
        if not wishes and not self._wishes:
            return
        with self._changed:
            self._wishes = wishes
            self._wanted = {chunk.id for chunks in wishes.values() for chunk in chunks}
            self._make_room()
            self._served = {
                request: turn for request, turn in self._served.items() if request in wishes
            }
            is_stale = self._job is not None and self._job.chunk.id not in self._wanted
            self._look()
            self._changed.notify()
        if is_stale:
            self._projector.interrupt()

    def counters(self) -> dict[str, Any]:
        """Return the fields of `EngineCounters` for the encoder."""
        return {"media_chunks": self._n_encoded, "media_s": self._seconds}

    def settle(self, chunk: MediaChunk) -> None:
        """Note that all requests that a chunk failed for have ended. Others may try it again."""
        with self._changed:
            self._failed.discard(chunk.id)
            self._look()

    def get(self, chunk: MediaChunk) -> Embeddings | None:
        """Return the embeddings of a chunk, if they are kept; this counts as a use."""
        with self._changed:
            embeddings = self._encoded.get(chunk.id)
            if embeddings is not None:
                self._encoded.move_to_end(chunk.id)
            return embeddings

    def set_threads(self, count: int) -> None:
        """Encode with `count` threads.

        A running encoding with more threads than that begins again. One with fewer begins again at
        most once, if it then ends sooner.
        """
        if count == self.threads:
            return
        self.threads = count
        self._projector.set_threads(count)
        job = self._job
        if job is None or job.threads == count:
            return
        if job.threads < count:
            if job.chunk.id == self._raised or not job.is_slow(count):
                return
            self._raised = job.chunk.id
        self._projector.interrupt()

    def start(self) -> None:
        """Start the thread, unless it has none. Raises ModelLoadError: the system refuses it."""
        if self.has_thread:
            start(self._thread)

    def close(self) -> None:
        with self._changed:
            self._closed, self._wishes = True, {}
            self._changed.notify()
        while self._thread.is_alive():
            self._projector.interrupt()  # it may have come before the encoding had begun
            self._thread.join(0.05)

    # -- from the encoder's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._next() is None and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            self.encode_next()

    def encode_next(self) -> bool:
        """Encode a chunk; returns False if there is nothing to encode."""
        with self._changed:
            task = self._next()
            if task is None:
                return False
            request, chunk = task
            self._turn += 1
            self._served[request] = self._turn
            work = self._work_per_cell * chunk.n_cells
            job = self._job = _Job(chunk, self.threads, monotonic(), work)
        embeddings, error = self._encode(chunk)
        with self._changed:
            self._job = None
            seconds = monotonic() - job.begin
            self._seconds += seconds
            if embeddings is not None:
                self._n_encoded += 1
                self._work_per_cell = seconds * job.threads / chunk.n_cells
                self._encoded[chunk.id] = embeddings
                self._size += embeddings.nbytes
                self._make_room()
            elif not isinstance(error, EncodeInterruptedError):
                self._failed.add(chunk.id)
            self._look()
        if not isinstance(error, EncodeInterruptedError):  # else it may have its turn again
            self._done(Encoded(chunk, error))
        return True

    def _encode(self, chunk: MediaChunk) -> tuple[Embeddings | None, TrioServeError | None]:
        try:
            return self._projector.encode(chunk), None
        except EncodeError as error:
            return None, error
        except Exception as error:
            _log.exception("cannot encode", kind=chunk.kind)
            failure = EncodeError(f"The {chunk.kind} could not be encoded.")
            failure.__cause__ = error
            return None, failure

    # -- what comes next

    def _look(self) -> None:
        """Note that the wishes or their results have changed."""
        self.is_busy = self._job is not None or self._next() is not None

    def _next(self) -> tuple[int, MediaChunk] | None:
        """Choose a chunk to encode, and its request: the one whose last turn is longest ago."""
        for request in sorted(
            self._wishes, key=lambda request: (self._served.get(request, 0), request)
        ):
            first, *_ = chunks = self._wishes[request]
            missing = (chunk for chunk in chunks if chunk.id not in self._encoded)
            chunk = next(missing, None)
            if chunk is None or chunk.id in self._failed:
                continue
            if chunk is first or self._has_room(chunk):  # later ones are encoded ahead
                return request, chunk
        return None

    def _has_room(self, chunk: MediaChunk) -> bool:
        """True if a chunk fits beside the wanted chunks that are encoded."""
        wanted = [self._encoded[one] for one in self._wanted if one in self._encoded]
        bytes_per_cell = wanted[0].nbytes // len(wanted[0]) if wanted else 0
        return sum(one.nbytes for one in wanted) + chunk.n_cells * bytes_per_cell <= self.limit

    def _make_room(self) -> None:
        """Forget embeddings beyond the limit, those unused for longest first."""
        if self._size <= self.limit:
            return
        for one in [one for one in self._encoded if one not in self._wanted]:
            if self._size <= self.limit:
                return
            self._size -= self._encoded.pop(one).nbytes
