"""What goes between an ingress and a replica: plain values, because Serve pickles them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

#: A request on its way: method, target, headers, body.
Sent: TypeAlias = tuple[str, str, Sequence[tuple[bytes, bytes]], bytes]

#: A part of an answer: a piece of the body, or a tuple that begins with one of the words below.
Part: TypeAlias = bytes | tuple[Any, ...]

#: The replica has the request. So whoever waits knows that it is not for want of a replica.
TAKEN = "taken"

#: The status, the headers, and the beginning of the body.
HEAD = "head"

#: The child did not get the request; it has ended, or is about to.
UNSENT = "unsent"

#: The child has ended before the answer did.
LOST = "lost"
