"""Counts the characters of JSON that the event loop's thread reads and writes at once."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trioserve
from trioserve.api.base import sse

_PACKAGE = str(Path(trioserve.__file__).parent)


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Watch the json module on this thread; gives the largest size by the line that asked for it.

    What code outside of trioserve asks for does not count.
    """
    found: dict[str, int] = {}
    thread, encode, decode = threading.get_ident(), json.JSONEncoder.encode, json.JSONDecoder.decode

    def see(size: int) -> None:
        frame = sys._getframe(2)
        while Path(frame.f_code.co_filename).parent.name == "json" and frame.f_back is not None:
            frame = frame.f_back
        if threading.get_ident() == thread and frame.f_code.co_filename.startswith(_PACKAGE):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            found[line] = max(found.get(line, 0), size)

    def watched_encode(self: json.JSONEncoder, value: Any) -> str:
        text = encode(self, value)
        see(len(text))
        return text

    def watched_decode(self: json.JSONDecoder, text: str, *args: Any) -> Any:
        see(len(text))
        return decode(self, text, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json.JSONEncoder, "encode", watched_encode)
        patch.setattr(json.JSONDecoder, "decode", watched_decode)
        patch.setattr(sse, "encode", partial(watched_encode, sse.encode.__self__))  # type: ignore[attr-defined]
        yield found
