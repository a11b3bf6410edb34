"""From a JSON object to a frozen attrs class, strictly, with errors that name fields.

A request class is an attrs class whose fields are named as in JSON, or carry other names in
their declaration (see `field`). A null counts as absent, as in llama-server. What fields say
together is checked in ``__attrs_post_init__``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import attrs

from trioserve.api.base import limits
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.types.params import INT32_MAX

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

Schema = dict[str, Any]


class MismatchError(Exception):
    """A value is not as expected; `expected` describes what is: "an integer"."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def check_count(n: int, limit: int, what: str) -> None:
    """Refuse more of something than a list may have. Raises `MismatchError`."""
    if n > limit:
        raise MismatchError(f"a list of at most {limit} {what}")


# -- bounds of texts, lists and objects


#: Keyword of a schema: the most characters of any JSON, roughly.
MAX_CHARS = "x-maxChars"

#: Checks a value at a path. Raises InvalidRequestError, which names the path.
Check: TypeAlias = Callable[[Any, str], None]

_TYPES: Mapping[type, str] = {str: "string", list: "array", dict: "object"}

#: For each type: the keyword of its bound, and what it says of the value and of its parts.
_SIZES: Mapping[type, tuple[str, str, str]] = {
    str: ("maxLength", "a string", "characters"),
    list: ("maxItems", "a list", "items"),
    dict: ("maxProperties", "an object", "fields"),
}

#: The keywords of the schemas of items, of names of fields, and of fields that are not known.
_INNER = ("items", "propertyNames", "additionalProperties")


def is_within(value: Any, limit: int) -> bool:
    """Compare JSON with a limit of characters: its strings, plus a few for each value."""
    size, values = 0, [value]
    while values and size <= limit:
        value = values.pop()
        size += 2
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            values += value
            values += value.values()
        elif isinstance(value, list):
            values += value
    return size <= limit


def check_of(schema: Any) -> Check | None:
    """Make the check of a schema's bounds: of texts, lists and objects. None: it has none."""
    if not isinstance(schema, Mapping):
        return None
    sizes = {kind: schema[name] for kind, (name, *_) in _SIZES.items() if name in schema}
    most = schema.get(MAX_CHARS)
    items, of_names, others = (check_of(schema.get(name)) for name in _INNER)
    known = {name: check_of(one) for name, one in schema.get("properties", {}).items()}
    choices = [(one, check_of(one)) for one in schema.get("anyOf", ())]
    of_fields = any((of_names, others, *known.values()))
    if not (sizes or most or items or of_fields or any(check for _, check in choices)):
        return None

    def check(value: Any, path: str) -> None:
        kind = type(value)
        if kind in sizes and len(value) > sizes[kind]:
            _, what, parts = _SIZES[kind]
            raise InvalidRequestError.at(path, f"must be {what} of at most {sizes[kind]} {parts}.")
        if most is not None and not is_within(value, most):
            raise InvalidRequestError.at(path, f"must have at most {most} characters as JSON.")
        if items is not None and kind is list:
            for i, each in enumerate(value):
                items(each, f"{path}[{i}]")
        for name, each in value.items() if of_fields and kind is dict else ():
            if of_names is not None:
                of_names(name, path)
            if (inner := known.get(name, others)) is not None:
                inner(each, f"{path}.{name:.80}")
        if choices and kind in _TYPES:
            _check_choices(choices, value, path)

    return check


def _check_choices(
    choices: Sequence[tuple[Mapping[str, Any], Check | None]], value: Any, path: str
) -> None:
    """Check that a value is within the bounds of one of several schemas that take its type."""
    kind, problem = _TYPES[type(value)], None
    for schema, check in choices:
        if kind not in schema.get("type", ()):  # a name or a list of names
            continue
        if check is None:
            return
        try:
            check(value, path)
        except InvalidRequestError as error:
            problem = error
        else:
            return
    if problem is not None:
        raise problem


# -- declaring fields


def field(
    *names: str,
    read: Callable[[Any], Any] | None = None,
    whole: Callable[[Mapping[str, Any]], Any] | None = None,
    schema: Schema | None = None,
    **kwargs: Any,
) -> Any:
    """Declare a field of a request class that its name and type alone do not describe.

    Args:
        names: its names in JSON when it has others, the one that wins first.
        read: turns the JSON value into the field's, or raises `MismatchError`. Without it, the
            type decides.
        whole: makes the field from the whole JSON object. If the field has a default, only of one
            that has something for it; see `json_type`.
        schema: of the JSON value, where `read` does not say; see `json_type`.
        kwargs: what `attrs.field` takes, such as ``default``.
    """
    return attrs.field(
        metadata={"names": names, "read": read, "whole": whole, "schema": schema}, **kwargs
    )


#: Texts: those in prompts and messages, names, and files.
STRING: Schema = {"type": "string", "maxLength": limits.MAX_PROMPT_CHARS}
NAME: Schema = {"type": "string", "maxLength": limits.MAX_NAME}
DATA: Schema = {"type": "string", "maxLength": limits.MAX_DATA}

#: Objects with any fields: schemas, and the arguments of tools.
SCHEMA: Schema = {"type": "object", MAX_CHARS: limits.MAX_SCHEMA}
ARGUMENTS: Schema = {"type": "object", MAX_CHARS: limits.MAX_ARGUMENTS}

#: Parts of messages, which may have files in them.
PART: Schema = {"type": "object", MAX_CHARS: limits.MAX_DATA}


def object_schema(*required: str, **properties: Mapping[str, Any]) -> Schema:
    """Describe an object by the schemas of its fields; `required` names the required ones."""
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": list(required)} if required else schema


def list_schema(items: Mapping[str, Any], limit: int, **more: Any) -> Schema:
    """Describe a list of at most `limit` items."""
    return {"type": "array", "items": items, "maxItems": limit, **more}


def or_null(schema: Schema) -> Schema:
    """Allow null as well, which counts as absent."""
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    added = {}
    if "anyOf" in schema:
        added["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if "enum" in schema and None not in schema["enum"]:
        added["enum"] = [*schema["enum"], None]
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        added["type"] = [*kinds, *(() if "null" in kinds else ("null",))]
    return {**schema, **added}


def json_type(
    schema: Mapping[str, Any] | None = None,
    *,
    properties: Mapping[str, Mapping[str, Any]] | None = None,
    others: Iterable[str] = (),
) -> Callable[[_F], _F]:
    """Declare the JSON that a reader takes, for `trioserve.api.openapi`.

    Args:
        schema: of the value that a `read` takes, as JSON Schema.
        properties: the schemas of the fields that a `whole` looks at, by name.
        others: fields that it looks at, too, and that are not described.
    """

    def tell(reader: _F) -> _F:
        reader.json_schema = schema  # type: ignore[attr-defined]
        reader.json_properties = properties or {}  # type: ignore[attr-defined]
        reader.looks_at = frozenset((*(properties or ()), *others))  # type: ignore[attr-defined]
        return reader

    return tell


# -- fields without effect


class Only:
    """The accepted values of a field that has no effect here; null is always accepted.

    Args:
        values: the accepted values. True and 1 differ, as in JSON.
        harmless: why an answer is right with any other value. These are left out, and logged.
    """

    def __init__(self, *values: Any, harmless: str = "") -> None:
        self._values, self.harmless = values, harmless

    def has(self, value: Any) -> bool:
        return any(value == each and type(value) is type(each) for each in self._values)


def refuse_unsupported(
    body: Mapping[str, Any], unsupported: Mapping[str, Only], path: str = ""
) -> None:
    """Refuse fields that would be without effect, or leave them out where that is harmless.

    `path` stands before their names in errors.

    Raises:
        UnsupportedFieldError: naming the first one.
    """
    for name, only in unsupported.items():
        value = body.get(name)
        if value is not None and not only.has(value):
            if only.harmless:
                leave_out(f"{path}{name}", only.harmless)
                continue
            raise UnsupportedFieldError.at(
                f"{path}{name}", "is not supported with this value; leave it out."
            )


# -- reading them


@attrs.frozen(kw_only=True)
class PromptFields:
    """The fields of a request that make up its prompt, in the order of most chat templates.

    `head` is what conversations have in common; a message list in `turns` is read one by one.
    """

    head: tuple[str, ...] = ()
    turns: tuple[str, ...]


class RequestBody:
    """The base of request classes, which are made of a body or of a part of one."""

    #: Known fields without effect. They are refused, unless they ask for what happens anyway, or
    #: are harmless to leave out.
    unsupported: ClassVar[Mapping[str, Only]] = {}

    #: The fields that may name the model, the one that wins first.
    model_names: ClassVar[tuple[str, ...]] = ("model",)

    #: The fields that make up the prompt, if it can be cached, in the order of most templates.
    prompt_fields: ClassVar[PromptFields | None] = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        return structure(cls, body)


def structure(cls: type[_T], body: Mapping[str, Any], path: str = "", **made: Any) -> _T:
    """Make a request class from a JSON object. Fields that it does not know are ignored.

    Args:
        path: what stands before the names of fields in errors: where the object is in the body.
        made: fields that are made already.

    Raises:
        InvalidRequestError: a field is missing or has the wrong type; `param` names it.
        UnsupportedFieldError: a field is without effect here.
    """
    if issubclass(cls, RequestBody):
        refuse_unsupported(body, cls.unsupported, path)
    values: dict[str, Any] = {}
    for each in _all_fields_of(cast(Hashable, cls)):
        if each.whole is not None:
            is_there = not each.looks_at.isdisjoint(body)
            if each.name in made:
                values[each.name] = made[each.name]
            elif is_there or each.required:
                values[each.name] = each.whole(body)
            if is_there:
                each.check_properties(body, path)
            continue
        for name in each.names:
            if (value := body.get(name)) is not None:
                values[each.name] = each.structure(value, f"{path}{name}")
                break
        else:
            if each.required:
                name = f"{path}{each.names[0]}"
                raise InvalidRequestError.at(name, "is required.")
    return cls(**values)


@attrs.frozen
class Field:
    """A field of a request class, and its reader; see `field`."""

    name: str
    names: tuple[str, ...]
    read: Any
    whole: Any
    looks_at: frozenset[str]  # the fields that `whole` looks at
    inner: type | None  # the class of an object, whose fields are read in turn
    required: bool
    schema: Any  # of the JSON value
    attribute: attrs.Attribute[Any]
    checks: Mapping[str, Check]  # of its bounds, or those of the fields that `whole` looks at

    def structure(self, value: Any, path: str) -> Any:
        """Read a value that stands at `path`. Raises InvalidRequestError, which names it."""
        for check in self.checks.values():
            check(value, path)
        read = named(self.read, value, path)
        return read if self.inner is None else structure(self.inner, read, f"{path}.")

    def check_properties(self, body: Mapping[str, Any], path: str) -> None:
        """Check the bounds of what `whole` looks at. Raises InvalidRequestError, which names it."""
        for name, check in self.checks.items():
            if name in body:
                check(body[name], f"{path}{name}")


def fields_of(cls: Any, names: Iterable[str] | None = None) -> list[Field]:
    """The fields of a request class, or those of the names."""
    if names is None:
        return list(_all_fields_of(cls))
    return [_field_of(cls, name) for name in attrs.fields_dict(cls) if name in names]


@cache
def _all_fields_of(cls: Hashable) -> tuple[Field, ...]:
    fields = attrs.fields_dict(cast(Any, cls)).items()
    return tuple(_field_of(cls, name) for name, attribute in fields if attribute.init)


def _field_of(cls: Any, name: str) -> Field:
    attribute = attrs.fields_dict(cls)[name]
    read, whole = attribute.metadata.get("read"), attribute.metadata.get("whole")
    inner = None
    if read is None and whole is None:
        type_ = _without_none(types_of(cls)[name])
        inner = type_ if attrs.has(type_) else None
        if get_origin(type_) is Literal:
            read = one_of(*get_args(type_))
        else:
            read = mapping if inner is not None else READERS[type_]
    schema = attribute.metadata.get("schema") or getattr(read, "json_schema", None)
    bounded = {name: schema} if whole is None else getattr(whole, "json_properties", {})
    return Field(
        name=name,
        names=attribute.metadata.get("names") or (name,),
        read=read,
        whole=whole,
        looks_at=getattr(whole, "looks_at", frozenset()),
        inner=inner,
        required=attribute.default is attrs.NOTHING,
        schema=schema,
        attribute=attribute,
        checks={key: check for key, one in bounded.items() if (check := check_of(one))},
    )


def _without_none(type_: Any) -> Any:
    """The type of a field when it is there: null counts as absent."""
    if get_origin(type_) not in (Union, UnionType):
        return type_
    (given,) = (each for each in get_args(type_) if each is not NoneType)
    return given


def named(reader: Callable[[Any], _T], value: Any, name: str) -> _T:
    """Read the value of one field. Raises InvalidRequestError, which names it."""
    try:
        return reader(value)
    except MismatchError as error:
        raise InvalidRequestError.at(name, f"must be {error.expected}.") from None


@contextmanager
def naming(names: Mapping[str, str | Callable[[int], str]]) -> Iterator[None]:
    """Give errors the names that fields have in this request, where the server has others.

    A name may depend on the index of an item: ``input[3]`` may be ``text_2[0]`` here.
    """
    try:
        yield
    except InvalidRequestError as error:
        name, bracket, rest = (error.param or "").partition("[")
        new = names.get(name)
        if new is not None:
            index = rest.removesuffix("]")
            place = new(int(index or 0)) if callable(new) else f"{new}{bracket}{rest}"
            error.message = error.message.replace(f"'{error.param}'", f"'{place}'")
            error.param = place
        raise


def required(fields: Mapping[str, Any], name: str, read: Callable[[Any], _T], path: str = "") -> _T:
    """Read a field of an object that stands at `path`. Raises InvalidRequestError, naming it."""
    where = f"{path}.{name}" if path else name
    if (value := fields.get(name)) is None:
        raise InvalidRequestError.at(where, "is required.")
    return named(read, value, where)


def optional(
    fields: Mapping[str, Any], name: str, read: Callable[[Any], _T], path: str = ""
) -> _T | None:
    """Read a field as `required` does; None: it is absent."""
    return None if fields.get(name) is None else required(fields, name, read, path)


@cache
def types_of(cls: Hashable) -> Mapping[str, Any]:
    """The types of an attrs class's fields, by name. The class itself stays as it is."""
    return get_type_hints(cls)


# -- readers by type


@json_type({"type": "integer"})
def integer(value: Any) -> int:
    """Take a whole number; ``5.0`` is one, and ``true`` is not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise MismatchError("an integer")
    return value


@json_type({"type": "number"})
def number(value: Any) -> float:
    """Take a number that fits in a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MismatchError("a number")
    if isinstance(value, int) and value.bit_length() > 1023:
        raise MismatchError("a number of a usual size")
    return value


@json_type({"type": "boolean"})
def boolean(value: Any) -> bool:
    """Return the value if it is a bool. Raises MismatchError otherwise."""
    if not isinstance(value, bool):
        raise MismatchError("true or false")
    return value


@json_type(STRING)
def text(value: Any) -> str:
    """Return the value if it is a string. Raises MismatchError otherwise."""
    if not isinstance(value, str):
        raise MismatchError("a string")
    return value


@json_type({"type": "array", "items": NAME, "maxItems": limits.MAX_INPUTS})
def strings(value: Any) -> tuple[str, ...]:
    """Take a list of strings."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise MismatchError("a list of strings")
    return tuple(value)


def one_of(*choices: str) -> Callable[[Any], str]:
    """Make a reader that takes one of a few strings."""
    quoted = [f'"{each}"' for each in choices]
    expected = " or ".join([*([", ".join(quoted[:-1])] if quoted[1:] else []), quoted[-1]])

    @json_type({"enum": list(choices)})
    def read(value: Any) -> str:
        if value not in choices:
            raise MismatchError(expected)
        return str(value)

    return read


def integer_in(low: int, high: int | None = INT32_MAX) -> Callable[[Any], int]:
    """Make a reader of whole numbers in a range; None: without an upper end."""
    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    expected = f"at least {low}" if high is None else f"between {low} and {high}"

    @json_type({"type": "integer", **bounds})
    def read(value: Any) -> int:
        given = integer(value)
        if given < low or (high is not None and given > high):
            raise MismatchError(expected)
        return given

    return read


@json_type(ARGUMENTS)
def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is an object. Raises MismatchError otherwise."""
    if not isinstance(value, dict):
        raise MismatchError("an object")
    return value


@json_type(
    {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": limits.MAX_METADATA_VALUE},
        "propertyNames": {"maxLength": limits.MAX_METADATA_NAME},
        "maxProperties": limits.MAX_METADATA,
    }
)
def labels(value: Any) -> dict[str, str]:
    """Take an object whose values are strings."""
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise MismatchError("an object whose values are strings")
    return value


@json_type({"type": "array", "items": ARGUMENTS, "maxItems": limits.MAX_INPUTS})
def objects(value: Any) -> tuple[dict[str, Any], ...]:
    """Take a list of objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise MismatchError("a list of objects")
    return tuple(value)


#: The default reader of a field, by its type.
READERS: Mapping[Any, Callable[[Any], Any]] = {
    int: integer,
    float: number,
    bool: boolean,
    str: text,
    tuple[str, ...]: strings,
    dict[str, Any]: mapping,
    dict[str, str]: labels,
}
