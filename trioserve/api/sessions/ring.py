"""`Ring`: the newest bytes of a stream, which may be read from any offset that is still there."""

from __future__ import annotations

from trioserve.errors import InvalidRequestError


class OffsetError(InvalidRequestError):
    """A reader of a stream asks for bytes that are no longer kept, or not there yet."""


class Ring:
    """Keeps whole events, up to a number of bytes; then the oldest events make room for new ones.

    Offsets count the bytes since the stream began. What is kept begins at `start`, which is where
    an event begins, and ends at `end`.

    Args:
        max_bytes: how many bytes are kept.
        mark: what each event ends with, and what occurs nowhere else.
    """

    def __init__(self, max_bytes: int, mark: bytes) -> None:
        self.start = 0
        self.closed = False
        self.mark = mark
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def end(self) -> int:
        """How many bytes the stream has had so far."""
        return self.start + len(self._bytes)

    def append(self, events: bytes) -> None:
        """Add whole events. One that is larger than the ring is not kept."""
        assert not self.closed and events.endswith(self.mark)
        self._bytes += events
        if len(self._bytes) > self._max_bytes:
            self.drop(len(self._bytes) - self._max_bytes)

    def drop(self, n_bytes: int) -> None:
        """Forget the oldest events, of at least so many bytes."""
        if n_bytes > 0:
            found = self._bytes.find(self.mark, max(n_bytes - len(self.mark), 0))
            n_bytes = len(self) if found < 0 else found + len(self.mark)
            del self._bytes[:n_bytes]
            self.start += n_bytes

    def close(self) -> None:
        """There will be no more events."""
        self.closed = True

    def check(self, offset: int, param: str | None = None) -> None:
        """Look whether a reader can begin at an offset; `param` says where it gave that.

        Raises:
            OffsetError: what is there is no longer kept, or the stream has not come so far.
        """
        if offset < self.start:
            raise OffsetError(
                f"Bytes {offset} to {self.start - 1} of the stream are no longer kept.", param=param
            )
        if offset > self.end:
            raise OffsetError(
                f"The stream has {self.end} bytes, and none at {offset}.", param=param
            )

    def is_boundary(self, offset: int) -> bool:
        """Whether an event begins at an offset that is there, or will begin."""
        before = offset - self.start
        begin = max(before - len(self.mark), 0)
        return before == 0 or self._bytes[begin:before] == self.mark

    def read(self, offset: int, about: int) -> bytes:
        """Give what there is from an offset on: up to `about` bytes, or else a single event.

        It ends where an event ends. Empty: there is no more, so far. Raises as `check`.
        """
        self.check(offset)
        first = offset - self.start
        last = len(self)
        if last - first > about:
            begin = max(first - len(self.mark) + 1, 0)  # a reader may begin within a mark
            last = self._bytes.rfind(self.mark, begin, first + about)
            if last < 0:
                last = self._bytes.find(self.mark, first + about - len(self.mark) + 1)
            last += len(self.mark)
        return bytes(self._bytes[first:last])
