"""The body of a request that is a form with files: ``multipart/form-data``."""

from __future__ import annotations

from collections import defaultdict
from typing import cast

import attrs
import trio
from quart import request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from trioserve.api.base import limits
from trioserve.api.base.connection import Request
from trioserve.errors import InvalidRequestError, PayloadTooLargeError

#: Bytes that are parsed at once, so that other threads get a turn in between.
_PIECE = 64 * 1024

#: Bytes of the head of a part.
_MAX_HEAD = 16 * 1024


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


@attrs.frozen(kw_only=True)
class Form:
    """A form that was read. A name may occur several times, each with a value."""

    fields: dict[str, list[str]]
    files: dict[str, bytes] = attrs.field(repr=False)

    def flag(self, name: str) -> bool | None:
        """Read a field that is true or false; None: it is not there, or something else."""
        return _FLAGS.get(self.fields.get(name, [""])[-1].strip().lower())


async def read_form() -> Form:
    """Read the form that is the body of the current request. A long one is parsed in a thread.

    The request's memory has room for the files as long as the request lasts.

    Raises:
        InvalidRequestError: it is no form.
        PayloadTooLargeError: it has too many parts, or its fields are too long.
        RequestEntityTooLarge: it is larger than the app allows.
        MemoryFullError: requests hold too much memory as it is.
    """
    current = cast(Request, request._get_current_object())  # type: ignore[attr-defined]
    boundary = boundary_of(current.headers.get("Content-Type", ""))
    data = await current.get_data(cache=False)
    assert isinstance(data, bytes)
    if current.overload is not None:
        raise current.overload
    current.held.grow(weight_of_form(data) - len(data))
    if len(data) <= _PIECE:
        form = parse_form(data, boundary)
    else:
        form = await trio.to_thread.run_sync(parse_form, data, boundary)
    current.held.shrink_to(len(data))
    return form


def is_form(content_type: str) -> bool:
    """Whether a body of this type is a form with files."""
    return parse_options_header(content_type)[0] == "multipart/form-data"


def with_field(data: bytes, boundary: bytes, name: str, value: str) -> bytes:
    """Put a field before the others of a form."""
    head = f'Content-Disposition: form-data; name="{name}"'.encode()
    return b"--%b\r\n%b\r\n\r\n%b\r\n%b" % (boundary, head, value.encode(), data)


def weight_of_form(data: bytes) -> int:
    """Estimate what a form takes: a file in it is there in pieces, and then as a whole."""
    return 3 * len(data)


def boundary_of(content_type: str) -> bytes:
    """Find what stands between the parts of a form. Raises InvalidRequestError: it is none."""
    kind, options = parse_options_header(content_type)
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary or not boundary.isascii():
        raise InvalidRequestError(
            "The body must be a form, multipart/form-data, in which the recording is a file."
        )
    return boundary.encode("ascii")


def parse_form(data: bytes, boundary: bytes) -> Form:
    """Parse a form. Of files with the same name, the last one counts.

    Raises:
        InvalidRequestError: it is not as a form has to be.
        PayloadTooLargeError: it has too many parts, or its fields are too long.
    """
    try:
        return _Parser(boundary).parse(data)
    except RequestEntityTooLarge:
        raise PayloadTooLargeError(
            f"The form has more than {limits.MAX_FORM_PARTS} parts, or fields of more than "
            f"{limits.MAX_FORM_FIELDS} bytes together."
        ) from None
    except UnicodeDecodeError:
        raise InvalidRequestError("The form has text that is not UTF-8.") from None
    except ValueError as error:
        raise InvalidRequestError(f"The form cannot be read: {error}.") from None


class _Parser:
    def __init__(self, boundary: bytes) -> None:
        self._decoder = MultipartDecoder(
            boundary, _PIECE + _MAX_HEAD, max_parts=limits.MAX_FORM_PARTS
        )
        self._fields: defaultdict[str, list[str]] = defaultdict(list)
        self._files: dict[str, bytes] = {}
        self._part: Field | File | None = None
        self._pieces: list[bytes] = []
        self._n_field_bytes = 0

    def parse(self, data: bytes) -> Form:
        view = memoryview(data)
        for start in range(0, len(data), _PIECE):
            self._decoder.receive_data(bytes(view[start : start + _PIECE]))
            self._take_events()
        self._decoder.receive_data(None)
        self._take_events()
        return Form(fields=dict(self._fields), files=self._files)

    def _take_events(self) -> None:
        while not isinstance(event := self._decoder.next_event(), NeedData | Epilogue):
            if isinstance(event, Field | File):
                if not event.name:
                    raise ValueError("a part has no name")
                self._part, self._pieces = event, []
            elif isinstance(event, Data):
                self._take(event)

    def _take(self, event: Data) -> None:
        assert self._part is not None
        self._pieces.append(event.data)
        if isinstance(self._part, Field):
            self._n_field_bytes += len(event.data)
            if self._n_field_bytes > limits.MAX_FORM_FIELDS:
                raise RequestEntityTooLarge
        if event.more_data:
            return
        whole = b"".join(self._pieces)
        if isinstance(self._part, File):
            self._files[self._part.name] = whole
        else:
            self._fields[self._part.name].append(whole.decode())
