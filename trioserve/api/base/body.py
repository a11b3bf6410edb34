"""The body of a request: JSON, which is parsed strictly, or a form with files.

Long JSON is read in a thread and in steps, because Python's own parser lets no other thread run
until it is done. Strings, and lists and objects up to `_STEP` characters, are still left to that
parser, piece by piece, so that it takes about as long as before.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn, TypeVar, cast

import attrs
import trio
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from trioserve.api.base import limits
from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.connection import Request, current_request
from trioserve.api.base.vendors import vendor_of
from trioserve.concurrency import Patience, check_cancelled
from trioserve.errors import InvalidRequestError, PayloadTooLargeError
from trioserve.fair_limiter import offload
from trioserve.server.limits.memory import weight_of

# -- JSON that is long


#: Characters that are parsed in one step: less than a millisecond.
_STEP = 32 * 1024

_BLANKS = re.compile(r"[ \t\n\r]*")
_PIECE = re.compile(rf'[^"\\]{{1,{_STEP}}}|(?:\\.[^"\\]{{0,8}}){{1,2048}}', re.DOTALL)

#: What a value in a list ends with, and the comma after it, by how the value before it begins.
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
        for text in _texts_of(level):
            text.encode()
        containers = [each for each in level if isinstance(each, list | dict)]
        if containers and depth == limits.MAX_DEPTH:
            raise RecursionError
        depth += 1
        level = [
            inner
            for each in containers
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, str | list | dict)
        ]


def _texts_of(level: list[Any]) -> Iterator[str]:
    for each in level:
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from each


# -- forms


#: Bytes that are parsed at once, so that other threads get a turn in between.
_FORM_PIECE = 64 * 1024

#: Bytes of the head of a part.
_MAX_HEAD = 16 * 1024


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


@attrs.frozen(kw_only=True)
class Form:
    """A form that was read. A name may occur several times, each with a value."""

    fields: dict[str, list[str]]
    files: dict[str, bytes] = attrs.field(repr=False)
    names: dict[str, str] = attrs.field(factory=dict)  # of the files, as clients have them

    def flag(self, name: str) -> bool | None:
        """Read a boolean field; None if it is absent or not a boolean."""
        return _FLAGS.get(self.fields.get(name, [""])[-1].strip().lower())


def is_form(content_type: str) -> bool:
    """Whether a body of this type is a form with files."""
    return parse_options_header(content_type)[0] == "multipart/form-data"


def with_field(data: bytes, boundary: bytes, name: str, value: str) -> bytes:
    """Put a field before the others of a form."""
    head = f'Content-Disposition: form-data; name="{name}"'.encode()
    return b"--%b\r\n%b\r\n\r\n%b\r\n%b" % (boundary, head, value.encode(), data)


def weight_of_form(data: bytes) -> int:
    """Estimate the memory that a form takes: a file is held in pieces, and then as a whole."""
    return 3 * len(data)


def boundary_of(content_type: str) -> bytes:
    """Find the boundary of a form. Raises InvalidRequestError if there is none."""
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
        return _FormParser(boundary).parse(data)
    except RequestEntityTooLarge:
        raise PayloadTooLargeError(
            f"The form has more than {limits.MAX_FORM_PARTS} parts, or fields of more than "
            f"{limits.MAX_FORM_FIELDS} bytes together."
        ) from None
    except UnicodeDecodeError:
        raise InvalidRequestError("The form has text that is not UTF-8.") from None
    except ValueError as error:
        raise InvalidRequestError(f"The form cannot be read: {error}.") from None


class _FormParser:
    def __init__(self, boundary: bytes) -> None:
        self._decoder = MultipartDecoder(
            boundary, _FORM_PIECE + _MAX_HEAD, max_parts=limits.MAX_FORM_PARTS
        )
        self._fields: defaultdict[str, list[str]] = defaultdict(list)
        self._files: dict[str, bytes] = {}
        self._names: dict[str, str] = {}
        self._part: Field | File | None = None
        self._pieces: list[bytes] = []
        self._n_field_bytes = 0

    def parse(self, data: bytes) -> Form:
        view = memoryview(data)
        for start in range(0, len(data), _FORM_PIECE):
            check_cancelled()
            self._decoder.receive_data(bytes(view[start : start + _FORM_PIECE]))
            self._take_events()
        self._decoder.receive_data(None)
        self._take_events()
        return Form(fields=dict(self._fields), files=self._files, names=self._names)

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
            self._names[self._part.name] = self._part.filename
        else:
            self._fields[self._part.name].append(whole.decode())


# -- bodies


_T = TypeVar("_T")

#: Bodies up to this length (bytes) are read on the event loop: it takes about 1 ms.
_SHORT_BODY = 32 * 1024


async def read_body() -> dict[str, Any]:
    """Read the JSON object that is the body of the current request.

    Raises:
        InvalidRequestError: it is not a JSON object.
        RequestEntityTooLarge: it is larger than the app allows.
        MemoryFullError: requests hold too much memory as it is.
    """
    return await read_body_as(lambda body: body)


async def read_body_as(parse: Callable[[dict[str, Any]], _T]) -> _T:
    """Read the JSON object that is the body of the current request, and parse it further.

    Raises:
        InvalidRequestError: it is not a JSON object; or from `parse`, which may run in a thread.
        RequestEntityTooLarge: it is larger than the app allows.
        MemoryFullError: requests hold too much memory as it is.
    """
    read = _with_vllm_priority if _is_lower_first() else parse_object
    return await _read(lambda data: parse(read(data)))


async def read_json() -> Any:
    """Read the JSON that is the body of the current request.

    Raises:
        InvalidRequestError: it is not JSON.
        RequestEntityTooLarge: it is larger than the app allows.
        MemoryFullError: requests hold too much memory as it is.
    """
    return await _read(parse_json)


async def read_whole(look: Callable[[bytes], _T]) -> tuple[bytes, _T]:
    """Read the body of the current request as it came, and what a function finds in it.

    Here and in `look_into`, it may be a form with files.

    Raises:
        TrioServeError: from `look`, which may run in a thread; or as `read_json`.
    """
    found = await _read(lambda data: (data, look(data)))
    current_request().held.shrink_to(len(found[0]))  # what else was made of it is gone
    return found


async def read_form() -> Form:
    """Read the form that is the body of the current request.

    The request's memory has room for the files as long as the request lasts.

    Raises:
        InvalidRequestError: it is no form.
        PayloadTooLargeError: it has too many parts, or its fields are too long; or as `read_json`.
    """
    boundary = boundary_of(current_request().headers.get("Content-Type", ""))
    _, form = await read_whole(lambda data: parse_form(data, boundary))
    return form


async def look_into(look: Callable[[bytes], _T]) -> _T:
    """Look into the body of the current request, which its handler will read after that.

    Raises:
        TrioServeError: from `look`, which may run in a thread; or as `read_json`.
    """
    return await _read(look, keep=True)


async def _read(parse: Callable[[bytes], _T], *, keep: bool = False) -> _T:
    current = current_request()
    data = await _received(current)
    if not keep:
        current.body.clear()
    if current.overload is not None:
        raise current.overload
    weigh = weight_of_form if is_form(current.headers.get("Content-Type", "")) else weight_of
    try:
        weight = await offload(partial(weigh, data), len(data), _SHORT_BODY)
        current.held.grow(weight - len(data))
        return await offload(partial(parse, data), len(data), _SHORT_BODY)
    finally:
        if keep:  # what was made of it is gone
            current.held.shrink_to(len(data))


async def _received(current: Request) -> bytes:
    """The whole body of a request. Raises RequestTimeout if it does not arrive in time."""

    async def receive() -> bytes:
        return bytes(await current.body)

    try:
        return await Patience(current_app_state().config.timeout).wait(receive)
    except trio.TooSlowError:
        raise RequestTimeout from None


def _is_lower_first() -> bool:
    is_flag_set = current_app_state().config.priority_order == "lower-first"
    return is_flag_set and not vendor_of(current_request().path).orders_priorities


def _with_vllm_priority(data: bytes) -> dict[str, Any]:
    """Parse a JSON object, and turn its priority as vLLM orders them into ours."""
    body = parse_object(data)
    if type(priority := body.get("priority")) is int:
        body["priority"] = -priority
    return body


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequestError: it is something else."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return value


def parse_json(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        InvalidRequestError: it is something else, holds NaN, or text that is not Unicode.
    """
    try:
        text = data.decode("utf-8")
        if len(data) <= _SHORT_BODY:
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
    """Whether there may be half of a surrogate pair, or values that are nested too deeply."""
    depth = data.count(b"[") + data.count(b"{")
    return depth > limits.MAX_DEPTH or b"\\ud" in data or b"\\uD" in data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
