"""The body of a request: JSON, which is parsed strictly, and in a thread when it is long."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import trio
from quart import request

from trioserve.api.base import limits
from trioserve.api.base.connection import Request
from trioserve.api.base.forms import is_form, weight_of_form
from trioserve.api.base.long_json import LongReader, check_json
from trioserve.errors import InvalidRequestError
from trioserve.server.memory import weight_of

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
    return await _read(parse_object)


async def read_body_as(parse: Callable[[dict[str, Any]], _T]) -> _T:
    """Read the JSON object that is the body of the current request, and parse it further.

    Raises:
        InvalidRequestError: it is not a JSON object; or from `parse`, which may run in a thread.
        RequestEntityTooLarge: it is larger than the app allows.
        MemoryFullError: requests hold too much memory as it is.
    """
    return await _read(lambda data: parse(parse_object(data)))


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
    held = cast(Request, request._get_current_object()).held  # type: ignore[attr-defined]
    held.shrink_to(len(found[0]))  # what else was made of it is gone
    return found


async def look_into(look: Callable[[bytes], _T]) -> _T:
    """Look into the body of the current request, which its handler will read after that.

    Raises:
        TrioServeError: from `look`, which may run in a thread; or as `read_json`.
    """
    return await _read(look, keep=True)


async def _read(parse: Callable[[bytes], _T], *, keep: bool = False) -> _T:
    current = cast(Request, request._get_current_object())  # type: ignore[attr-defined]
    data = await current.get_data(cache=keep)
    assert isinstance(data, bytes)
    if current.overload is not None:
        raise current.overload
    weigh = weight_of_form if is_form(current.headers.get("Content-Type", "")) else weight_of
    try:
        if len(data) <= _SHORT_BODY:
            current.held.grow(weigh(data) - len(data))
            return parse(data)
        weight = await trio.to_thread.run_sync(weigh, data)
        current.held.grow(weight - len(data))
        return await trio.to_thread.run_sync(parse, data)
    finally:
        if keep:  # what was made of it is gone
            current.held.shrink_to(len(data))


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
