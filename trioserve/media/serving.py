"""The frame of a process that decodes: orders come in, answers go out, one file after another.

What reads files of strangers is mostly C, and has had its faults. So this process has nothing to
lose and nothing to gain: it can open no file and no socket, has a limit of memory and one of time
for each file, and none of the server's secrets. It ends when its socket does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from trioserve.children import inside
from trioserve.errors import InvalidMediaError
from trioserve.media.orders import Answer, End, MediaLimits, Order, Refused

#: Its niceness: the threads that compute tokens have priority.
_NICE = 5

_encode = msgspec.msgpack.Encoder().encode


#: Decodes a file. It may raise any exception.
Decode: TypeAlias = Callable[[Order, bytes, MediaLimits], Iterator[Answer]]


def serve(
    limits: MediaLimits,
    receive: Callable[[], bytes | None],
    send: Callable[[bytes], object],
    decode: Decode,
) -> None:
    """Decode files until there are no more orders."""
    while (order := receive()) is not None and (data := receive()) is not None:
        inside.limit_time(limits.timeout)
        end: Answer = End()
        try:
            for answer in decode(msgspec.msgpack.decode(order, type=Order), data, limits):
                send(_encode(answer))
        except InvalidMediaError as error:
            end = Refused(error.message)
        except MemoryError:
            end = Refused("takes too much memory to decode")
        except Exception as error:  # decoders raise many types for damaged files
            end = Refused(f"cannot be read ({_reason(error)})")
        send(_encode(end))
        inside.limit_time(0)


def _reason(error: Exception) -> str:
    """A decoder's answer about a file."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(said).partition("\n")[0][:200]


def confine(limits: MediaLimits) -> None:
    """Give up what decoding does not need. All modules have been imported."""
    if sys.platform == "win32":
        return
    os.nice(_NICE)
    inside.go_first()
    for limit in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC"):
        inside.lower(limit, 0)
    inside.limit_memory(limits.max_memory)
    inside.lower("RLIMIT_NOFILE", 3)  # those that are open: no file, no socket beside them


def main(decode: Decode) -> None:
    """Serve the process that has started this one."""
    limits = MediaLimits(**json.loads(sys.argv[1]))
    parent = inside.Parent()
    confine(limits)
    serve(limits, parent.receive, parent.send, decode)
