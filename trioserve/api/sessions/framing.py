"""The events of a stream, whole and with ids, out of the parts in which its body comes."""

from __future__ import annotations


class Framing:
    """Cuts a body into events. `mark` is what each of them ends with.

    `n_events` counts those that have data.
    """

    mark = b"\n"

    def __init__(self) -> None:
        self.n_events = 0
        self._rest = b""  # the beginning of an event

    def feed(self, part: bytes, offset: int) -> bytes:
        """Take a part of the body; gives the events that end in it, the first at an offset."""
        part = self._rest + part
        if part.endswith(self.mark) and part.count(self.mark) == 1:  # as nearly all do
            self._rest = b""
            return self.write(part, offset)
        *events, self._rest = part.split(self.mark)
        written = bytearray()
        for event in events:
            written += self.write(event + self.mark, offset + len(written))
        return bytes(written)

    def write(self, event: bytes, offset: int) -> bytes:
        """Write an event that begins at an offset."""
        self.n_events += 1
        return event


class EventFraming(Framing):
    """Cuts server-sent events, and gives each the offset of its end as its id.

    A browser's `EventSource` sends the last id back as ``Last-Event-ID``, which so is an offset.
    """

    mark = b"\n\n"

    def write(self, event: bytes, offset: int) -> bytes:
        """Write an event that begins at an offset. Comments have no id."""
        if event.startswith(b":"):
            return event
        self.n_events += 1
        end = offset + len(event) + len(b"id: \n")
        n_digits = len(str(end))
        if len(str(end + n_digits)) > n_digits:  # the digits of the id are counted in it
            n_digits += 1
        return b"id: %d\n%b" % (end + n_digits, event)


def framing_of(content_type: str) -> Framing:
    """Make what cuts a body of this type: server-sent events, or else lines."""
    return EventFraming() if content_type == "text/event-stream" else Framing()
