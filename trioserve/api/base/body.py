"""The body of a request: JSON, which is parsed strictly, or a form with files.

Long JSON is read in a thread and in steps, because Python's own parser lets no other thread run
until it is done. Strings, and lists and objects up to `_STEP` characters, are still left to that
parser, piece by piece, so that it takes about as long as before.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn, TypeVar, cast

import attrs
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Event, Field, File, MultipartDecoder, NeedData

from trioserve.api.base import limits
from trioserve.concurrency import check_cancelled
from trioserve.errors import InvalidRequestError, PayloadTooLargeError
from trioserve.fair_limiter import offload
from trioserve.server.limits.memory import MemoryReservation, weight_of

# -- JSON that is long


#: Characters that are parsed in one step: less than a millisecond.
_STEP = 32 * 1024

_BLANKS = re.compile(r"[ \t\n\r]*")
_PIECE = re.compile(rf'[^"\\]{{1,{_STEP}}}|(?:\\.[^"\\]{{0,8}}){{1,2048}}', re.DOTALL)

#: The end of a value in a list, with the comma after it, by the first letter of the value before.
_ENDS = {'"': '",', "{": "},", "[": "],"}
#: After this many values that had to be read one by one, stop reading a list in batches.
_MAX_ALONE = 64

_Scan = Callable[[str, int], tuple[Any, int]]
_Container = TypeVar("_Container", list[Any], dict[str, Any])


class LongReader:
    """Reads one JSON value of any length.

    Raises:
        InvalidRequestError: it has too many values, or is nested too deeply.
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """

    def __init__(self, text: str, parse_constant: Callable[[str], Any]) -> None:
        self._text = text
        scanner = json.JSONDecoder(parse_constant=parse_constant)
        self._scan = cast(_Scan, scanner.scan_once)  # type: ignore[attr-defined]
        self._n_values = 0

    def read(self) -> Any:
        """Read the value that is all of the text."""
        value, end = self._value(self._skip(0), 0)
        if (end := self._skip(end)) != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, end)
        return value

    def _skip(self, at: int) -> int:
        return cast(re.Match[str], _BLANKS.match(self._text, at)).end()

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        kind = self._text[at : at + 1]
        if kind == '"':
            return self._string(at)
        if kind not in ("[", "{"):
            return self._scanned(at)
        for size in (_STEP // 32, _STEP):
            if at + size >= len(self._text):
                self._count(self._text.count(",", at))
                return self._scanned(at)
            try:
                value, length = self._scan(self._text[at : at + size], 0)
            except (json.JSONDecodeError, StopIteration):
                continue  # it is longer, or no JSON
            self._count(1 + self._text.count(",", at, at + length))
            return value, at + length
        if depth >= limits.MAX_DEPTH:
            raise RecursionError
        return self._filled(at, depth + 1, [] if kind == "[" else {})

    def _scanned(self, at: int) -> tuple[Any, int]:
        try:
            return self._scan(self._text, at)
        except StopIteration as error:
            raise json.JSONDecodeError("Expecting value", self._text, error.value) from None

    def _filled(self, at: int, depth: int, values: _Container) -> tuple[_Container, int]:
        """Read what is in a list or an object, which begins at a place."""
        brackets = "[]" if isinstance(values, list) else "{}"
        n_alone = 0  # values since some were last read together
        at = self._skip(at + 1)
        if self._text[at : at + 1] == brackets[1]:
            return values, at + 1
        while True:
            if n_alone < _MAX_ALONE:
                before = at
                at = self._many(at, values, brackets)
                n_alone = n_alone + 1 if at == before else 0
            at = self._one(at, depth, values)
            self._count(1)
            at = self._skip(at)
            if self._text[at : at + 1] == brackets[1]:
                return values, at + 1
            at = self._skip(self._expect(",", at, "Expecting ',' delimiter"))

    def _one(self, at: int, depth: int, values: _Container) -> int:
        """Read one value of a list, or a name and its value; returns where it ends."""
        if isinstance(values, list):
            value, at = self._value(at, depth)
            values.append(value)
            return at
        if self._text[at : at + 1] != '"':
            message = "Expecting property name enclosed in double quotes"
            raise json.JSONDecodeError(message, self._text, at)
        name, at = self._string(at)
        at = self._skip(self._expect(":", self._skip(at), "Expecting ':' delimiter"))
        values[name], at = self._value(at, depth)
        return at

    def _many(self, at: int, values: _Container, brackets: str) -> int:
        """Read as many values as fit in one step, except the last value of the container.

        Returns where the next value begins. The comma at the cut may be inside a value, but then
        the part before it does not parse.
        """
        while True:
            some = self._text[at : at + _STEP]
            if isinstance(values, list):
                cut = some.rfind(_ENDS.get(some[:1], ",")) + (some[:1] in _ENDS)
            else:
                cut = max(some.rfind(comma) for comma in (',"', ', "', ',\n"'))
            found = self._piece(some, cut, brackets)
            if found is None:
                return at
            values.extend(found) if isinstance(values, list) else values.update(found)
            at = self._skip(at + cut + 1)

    def _piece(self, some: str, cut: int, brackets: str) -> Any:
        """Parse a slice of a list or an object in its own brackets; None if a value is cut off."""
        if cut < _STEP // 2:
            return None
        try:
            found, length = self._scan(f"{brackets[0]}{some[:cut]}{brackets[1]}", 0)
        except (json.JSONDecodeError, StopIteration):
            return None  # a value is cut off, or invalid; reading values one by one reports that
        if length != cut + 2:
            return None
        self._count(some.count(",", 0, cut) + 1)
        return found

    def _string(self, at: int) -> tuple[str, int]:
        pieces: list[str] = []
        place = at + 1
        while (found := _PIECE.match(self._text, place)) is not None:
            check_cancelled()
            try:
                piece, _ = scanstring(found[0] + '"', 0)
            except json.JSONDecodeError:
                break  # which is found again, with its place in the text
            if pieces and "\udc00" <= piece[:1] <= "\udfff" and pieces[-1][-1:] >= "\ud800":
                pair = (pieces[-1][-1] + piece[0]).encode("utf-16", "surrogatepass")
                pieces[-1] = pieces[-1][:-1] + pair.decode("utf-16", "surrogatepass")
                piece = piece[1:]
            pieces.append(piece)
            place = found.end()
        if self._text[place : place + 1] == '"':
            return "".join(pieces), place + 1
        text, end = scanstring(self._text, at + 1)
        return text, end

    def _expect(self, letter: str, at: int, message: str) -> int:
        if self._text[at : at + 1] != letter:
            raise json.JSONDecodeError(message, self._text, at)
        return at + 1

    def _count(self, n: int) -> None:
        check_cancelled()
        self._n_values += n
        if self._n_values > limits.MAX_VALUES:
            raise InvalidRequestError(f"The body has more than {limits.MAX_VALUES} values.")


def check_json(value: Any) -> None:
    """Check what JSON may hold, but requests may not.

    Raises:
        RecursionError: it is nested too deeply.
        UnicodeError: a text has half of a surrogate pair.
    """
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                each.encode()
            elif isinstance(each, list | dict):
                inner += each  # the names in an object
                inner += each.values() if isinstance(each, dict) else ()
        if depth == limits.MAX_DEPTH and any(isinstance(each, list | dict) for each in level):
            raise RecursionError
        level, depth = inner, depth + 1


# -- forms


#: Bytes that are parsed at once, so that other threads get a turn in between.
_FORM_PIECE = 64 * 1024

#: Bytes of the head of a part.
_MAX_HEAD = 16 * 1024


#: Booleans of a form.
FLAGS = {"true": True, "1": True, "false": False, "0": False}


@attrs.frozen(kw_only=True)
class Form:
    """A form that was read. A name may occur several times, each with a value."""

    fields: dict[str, list[str]]
    files: dict[str, bytes] = attrs.field(repr=False)
    names: dict[str, str] = attrs.field(factory=dict)  # of the files, as clients have them

    def flag(self, name: str) -> bool | None:
        """Read a boolean field; None if it is absent or not a boolean."""
        return FLAGS.get(self.fields.get(name, [""])[-1].strip().lower())


def boundary_of(content_type: str) -> bytes:
    """Find the boundary of a form. Raises InvalidRequestError: the body has no valid boundary."""
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
        return _form_of(data, boundary)
    except RequestEntityTooLarge:
        raise PayloadTooLargeError(
            f"The form has more than {limits.MAX_FORM_PARTS} parts, or fields of more than "
            f"{limits.MAX_FORM_FIELDS} bytes together."
        ) from None
    except UnicodeDecodeError:
        raise InvalidRequestError("The form has text that is not UTF-8.") from None
    except ValueError as error:
        raise InvalidRequestError(f"The form cannot be read: {error}.") from None


def _form_of(data: bytes, boundary: bytes) -> Form:
    form = Form(fields={}, files={})
    part: Field | File | None = None
    pieces: list[bytes] = []
    n_field_bytes = 0
    for event in _events_of(data, boundary):
        if isinstance(event, Field | File):
            if not event.name:
                raise ValueError("a part has no name")
            part, pieces = event, []
        if not isinstance(event, Data):
            continue
        assert part is not None
        pieces.append(event.data)
        if isinstance(part, Field):
            n_field_bytes += len(event.data)
            if n_field_bytes > limits.MAX_FORM_FIELDS:
                raise RequestEntityTooLarge
        if event.more_data:
            continue
        whole = b"".join(pieces)
        if isinstance(part, File):
            form.files[part.name], form.names[part.name] = whole, part.filename
        else:
            form.fields.setdefault(part.name, []).append(whole.decode())
    return form


def _events_of(data: bytes, boundary: bytes) -> Iterator[Event]:
    decoder = MultipartDecoder(boundary, _FORM_PIECE + _MAX_HEAD, max_parts=limits.MAX_FORM_PARTS)
    view = memoryview(data)
    for start in (*range(0, len(data), _FORM_PIECE), None):
        check_cancelled()
        decoder.receive_data(None if start is None else bytes(view[start : start + _FORM_PIECE]))
        while not isinstance(event := decoder.next_event(), NeedData | Epilogue):
            yield event


# -- bodies


_T = TypeVar("_T")

#: Bodies up to this length (bytes) are read on the event loop: it takes about 1 ms.
SHORT_BODY = 32 * 1024


@attrs.define(kw_only=True, eq=False)
class Incoming:
    """A request as it came: what a route reads its own request from.

    Attributes:
        method: of HTTP.
        path: without a prefix.
        receive: waits for the body, and gives it up: it is received once.
        held: counts the memory of the body and its values.
        query: the parameters in the URL.
        content_type: of the body.
    """

    method: str
    path: str
    receive: Callable[[], Awaitable[bytes]]
    held: MemoryReservation
    query: Mapping[str, str] = attrs.field(factory=dict)
    content_type: str = "application/json"
    size: int = 0  # of the body, in bytes, once it was received
    _fields: dict[str, Any] | None = attrs.field(alias="fields", default=None)
    _form: Form | None = attrs.field(init=False, default=None)

    @classmethod
    def of_fields(cls, path: str, fields: dict[str, Any], held: MemoryReservation) -> Incoming:
        """Make a POST whose JSON is read already."""

        async def receive() -> bytes:  # for a route that takes bytes
            return json.dumps(fields).encode()

        return cls(
            method="POST", path=path, receive=receive, held=held, size=held.n_bytes, fields=fields
        )

    @property
    def is_form(self) -> bool:
        return parse_options_header(self.content_type)[0] == "multipart/form-data"

    def ask_for_stream(self) -> None:
        """Have the body, which was read, ask for a stream."""
        if self._form is not None:
            self._form.fields["stream"] = ["true"]
        elif self._fields is not None:
            self._fields["stream"] = True

    async def fields(self, *, may_be_empty: bool = False) -> dict[str, Any]:
        """Read the JSON object that is the body. It is parsed once.

        Args:
            may_be_empty: an empty body is an empty object.

        Raises:
            InvalidRequestError: it is not a JSON object.
            PayloadTooLargeError: it is larger than the app allows.
            MemoryFullError: requests hold too much memory as it is.
        """
        if self._fields is None:
            self._fields = await self.read(
                lambda data: {} if may_be_empty and not data else parse_object(data)
            )
        return self._fields

    async def form(self) -> Form:
        """Read the form that is the body. The request's memory has room for the files.

        Raises:
            InvalidRequestError: it is something else.
            PayloadTooLargeError: it has too many parts, or its fields are too long; as `fields`.
        """
        if self._form is None:
            boundary = boundary_of(self.content_type)
            self._form = await self.read(lambda data: parse_form(data, boundary))
            self.held.shrink_to(self.size)  # what else was made of it is gone
        return self._form

    async def read(self, parse: Callable[[bytes], _T]) -> _T:
        """Receive the body, and parse it, in a thread if it is long. Raises as `fields`."""
        data = await self.receive()
        self.size = len(data)
        if self.is_form:
            self.held.grow(2 * self.size)  # a file is held in pieces, and then as a whole
        else:
            self.held.grow(await self.aside(partial(weight_of, data)) - self.size)
        return await self.aside(partial(parse, data))

    async def aside(self, work: Callable[[], _T]) -> _T:
        """Do work on the body, in a thread if it is long."""
        return await offload(work, self.size, SHORT_BODY)


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequestError: it is something else."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return value


def parse_json(data: bytes) -> Any:
    """Parse JSON, which may begin with a byte order mark: PowerShell and .NET write one.

    Raises:
        InvalidRequestError: it is something else, holds NaN, or text that is not Unicode.
    """
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        if len(data) <= SHORT_BODY:
            value = json.loads(text, parse_constant=_refuse_constant)
        else:
            value = LongReader(text, _refuse_constant).read()
        if _may_be_odd(data):
            check_json(value)
    except UnicodeError as error:
        raise InvalidRequestError(f"The body is not Unicode text: {error.reason}.") from None  # type: ignore[attr-defined]
    except RecursionError:
        raise InvalidRequestError(
            f"The body is nested too deeply; {limits.MAX_DEPTH} levels are allowed."
        ) from None
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    return value


def _may_be_odd(data: bytes) -> bool:
    """Look for signs of half a surrogate pair, and of deep nesting."""
    depth = data.count(b"[") + data.count(b"{")
    return depth > limits.MAX_DEPTH or b"\\ud" in data or b"\\uD" in data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
