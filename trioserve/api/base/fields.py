"""From the JSON body of a request to frozen attrs classes, strictly, with errors that name fields.

A request class is an attrs class whose fields are named as in JSON, or carry other names in
their metadata (see `how`). A null counts as absent, as in llama-server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from typing import Any, NoReturn, TypeVar, cast, get_type_hints

import attrs
import cattrs
import trio
from quart import request

from trioserve.errors import InvalidRequestError

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

#: Bodies up to this length (bytes) are parsed on the event loop: it takes about 2 ms.
_SHORT_BODY = 256 * 1024


class MismatchError(Exception):
    """A value is not what it should be; `wanted` says what that is: "an integer"."""

    def __init__(self, wanted: str) -> None:
        super().__init__(wanted)
        self.wanted = wanted


# -- the body


async def read_body() -> dict[str, Any]:
    """Read the JSON object that is the body of the current request.

    Raises:
        InvalidRequestError: it is not a JSON object.
        RequestEntityTooLarge: it is larger than the app allows.
    """
    return _object(await read_json())


async def read_json() -> Any:
    """Read the JSON that is the body of the current request.

    Raises:
        InvalidRequestError: it is not JSON.
        RequestEntityTooLarge: it is larger than the app allows.
    """
    data = await request.get_data(cache=False)
    assert isinstance(data, bytes)
    if len(data) <= _SHORT_BODY:
        return parse_json(data)
    return await trio.to_thread.run_sync(partial(parse_json, data))


def parse(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequestError: it is something else."""
    return _object(parse_json(data))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return value


def parse_json(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        InvalidRequestError: it is something else, holds NaN, or text that is not Unicode.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        if b"\\ud" in data or b"\\uD" in data:  # may be half of a pair, which is no character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise InvalidRequestError(f"The body is not Unicode text: {error.reason}.") from None  # type: ignore[attr-defined]
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# -- its fields


def how(
    *names: str,
    read: Callable[[Any], Any] | None = None,
    whole: Callable[[Mapping[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Make the metadata of a field of a request class: ``attrs.field(metadata=how("n"))``.

    Args:
        names: its names in JSON when it has others, the one that wins first.
        read: turns the JSON value into the field's, or raises `MismatchError`. Without it, the
            type decides.
        whole: makes the field from the whole JSON object.
    """
    return {"names": names, "read": read, "whole": whole}


def json_type(
    schema: Mapping[str, Any] | None = None,
    *,
    properties: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[_F], _F]:
    """Say what JSON a reader takes, for `trioserve.api.base.openapi`.

    Args:
        schema: of the value that a `read` takes, as JSON Schema.
        properties: the schemas of the fields that a `whole` looks at, by name.
    """

    def tell(reader: _F) -> _F:
        reader.json_schema = schema  # type: ignore[attr-defined]
        reader.json_properties = properties or {}  # type: ignore[attr-defined]
        return reader

    return tell


def structure(cls: type[_T], body: Mapping[str, Any]) -> _T:
    """Make a request class from a JSON object. Fields that it does not know are ignored.

    Raises:
        InvalidRequestError: a field is missing or has the wrong type; `param` names it.
    """
    values: dict[str, Any] = {}
    for field in _fields_of(cast(Hashable, cls)):
        if field.whole is not None:
            values[field.name] = field.whole(body)
            continue
        for name in field.names:
            if (value := body.get(name)) is not None:
                values[field.name] = named(field.read, value, name)
                break
        else:
            if field.required:
                name = field.names[0]
                raise InvalidRequestError(f"'{name}' is required.", param=name)
    return cls(**values)


@attrs.frozen
class _Field:
    """How one field of a request class is read; see `how`."""

    name: str
    names: tuple[str, ...]
    read: Callable[[Any], Any]
    whole: Callable[[Mapping[str, Any]], Any] | None
    required: bool


@cache
def _fields_of(cls: Hashable) -> tuple[_Field, ...]:
    """How a request class is read. Found out once."""
    types = types_of(cls)
    return tuple(
        _Field(
            each.name,
            each.metadata.get("names") or (each.name,),
            each.metadata.get("read") or _reader_of(types[each.name]),
            each.metadata.get("whole"),
            each.default is attrs.NOTHING,
        )
        for each in attrs.fields(cast(type[attrs.AttrsInstance], cls))
    )


def _reader_of(wanted: Any) -> Callable[[Any], Any]:
    return lambda value: _converter.structure(value, wanted)


def convert(value: Any, wanted: Any, name: str) -> Any:
    """Convert the value of one field to a type.

    Raises:
        InvalidRequestError: it is of another type.
    """
    return named(_reader_of(wanted), value, name)


def named(reader: Callable[[Any], Any], value: Any, name: str) -> Any:
    """Read the value of one field. Raises InvalidRequestError, which names it."""
    try:
        return reader(value)
    except MismatchError as error:
        raise InvalidRequestError(f"'{name}' must be {error.wanted}.", param=name) from None


@cache
def types_of(cls: Hashable) -> Mapping[str, Any]:
    """The types of an attrs class's fields, by name. The class itself stays as it is."""
    return get_type_hints(cls)


# -- strict conversions


def integer(value: Any) -> int:
    """Take a whole number; ``5.0`` is one, and ``true`` is not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise MismatchError("an integer")
    return value


def number(value: Any) -> float:
    """Take a number that fits in a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MismatchError("a number")
    if isinstance(value, int) and value.bit_length() > 1023:
        raise MismatchError("a number of a usual size")
    return value


def boolean(value: Any) -> bool:
    """Take true or false."""
    if not isinstance(value, bool):
        raise MismatchError("true or false")
    return value


def text(value: Any) -> str:
    """Take a string."""
    if not isinstance(value, str):
        raise MismatchError("a string")
    return value


def strings(value: Any) -> tuple[str, ...]:
    """Take a list of strings."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise MismatchError("a list of strings")
    return tuple(value)


def mapping(value: Any) -> dict[str, Any]:
    """Take an object."""
    if not isinstance(value, dict):
        raise MismatchError("an object")
    return value


def objects(value: Any) -> tuple[dict[str, Any], ...]:
    """Take a list of objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise MismatchError("a list of objects")
    return tuple(value)


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=False)
    for type_, read in ((int, integer), (float, number), (bool, boolean), (str, text)):
        converter.register_structure_hook(type_, lambda value, _, read=read: read(value))
    converter.register_structure_hook_func(
        lambda wanted: wanted == tuple[str, ...],
        lambda value, _: strings(value),
    )
    converter.register_structure_hook_func(
        lambda wanted: wanted == dict[str, Any], lambda value, _: mapping(value)
    )
    converter.register_structure_hook_func(
        attrs.has, lambda value, wanted: structure(wanted, mapping(value))
    )
    return converter


_converter = _make_converter()
