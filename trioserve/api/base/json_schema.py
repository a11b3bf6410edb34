"""What JSON a request class takes, as JSON Schema: from its types, defaults, bounds and readers."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from trioserve.api.base.fields import types_of

Schema = dict[str, Any]

_SCALARS: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    type(None): "null",
}

#: Where a description keeps the schemas of classes.
COMPONENTS = "#/components/schemas/"


def of_type(wanted: Any) -> Schema:
    """The schema of a type: a reference for a request class, anything for what is not JSON's."""
    if wanted in _SCALARS:
        return {"type": _SCALARS[wanted]}
    if attrs.has(wanted):
        return {"$ref": COMPONENTS + wanted.__name__}
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return {"enum": [each.value for each in wanted]}
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(each) for each in arguments]}
    if origin is tuple and arguments[1:] == (...,):
        return {"type": "array", "items": of_type(arguments[0])}
    if wanted is dict or origin in (dict, Mapping):
        return {"type": "object"}
    return {}


def of_fields(cls: Any, names: Iterable[str] | None = None) -> dict[str, Schema]:
    """The schemas of an attrs class's fields by the names that they have in JSON."""
    found: dict[str, Schema] = {}
    types = types_of(cls)
    for field in attrs.fields(cls):
        if names is not None and field.name not in names:
            continue
        whole = field.metadata.get("whole")
        if whole is not None:
            found |= {name: _or_null(dict(one)) for name, one in properties_of(whole).items()}
            continue
        schema = _of_field(field, types[field.name])
        first, *others = json_names(field)
        found[first] = schema
        about = f"Another name of {first}, which wins."
        found |= {name: {**schema, "description": about} for name in others}
    return found


def properties_of(whole: Any) -> Mapping[str, Schema]:
    """The schemas of the fields that a reader of whole objects looks at."""
    properties: Mapping[str, Schema] = getattr(whole, "json_properties", {})
    return properties


def json_names(field: attrs.Attribute[Any]) -> Sequence[str]:
    """The names of a field in JSON."""
    return field.metadata.get("names") or (field.name,)


def _of_field(field: attrs.Attribute[Any], type_: Any) -> Schema:
    read = field.metadata.get("read")
    given = None if read is None else getattr(read, "json_schema", None)
    schema = dict(given) if given is not None else ({} if read is not None else of_type(type_))
    bounds = getattr(field.validator, "bounds", None)
    if bounds is not None:
        low, high = bounds
        schema |= {"minimum": low} if math.isfinite(low) else {}
        schema |= {"maximum": high} if math.isfinite(high) else {}
    if field.default is attrs.NOTHING:
        return schema
    if isinstance(field.default, bool | int | float | str):
        schema["default"] = field.default
    return _or_null(schema)


def _or_null(schema: Schema) -> Schema:
    """A null counts as absent."""
    match schema:
        case {"type": str(kind)}:
            if "enum" in schema:
                return {**schema, "type": [kind, "null"], "enum": [*schema["enum"], None]}
            return {**schema, "type": [kind, "null"]}
        case {"type": list(kinds)}:
            return {**schema, "type": [*kinds, *(() if "null" in kinds else ("null",))]}
        case {"anyOf": list(kinds)}:
            null = {"type": "null"}
            return {**schema, "anyOf": [*kinds, *(() if null in kinds else (null,))]}
        case {"enum": list(values)}:
            return {**schema, "enum": [*values, *(() if None in values else (None,))]}
        case {"$ref": _}:
            return {"anyOf": [schema, {"type": "null"}]}
    return schema


def of_class(cls: Any) -> Schema:
    """The schema of a request class. Fields that it does not know are ignored, so may be there."""
    schema: Schema = {"type": "object", "properties": of_fields(cls)}
    required = [
        json_names(field)
        for field in attrs.fields(cls)
        if field.default is attrs.NOTHING and field.metadata.get("whole") is None
    ]
    if only := [names[0] for names in required if len(names) == 1]:
        schema["required"] = only
    if several := [names for names in required if len(names) > 1]:
        schema["allOf"] = [{"anyOf": [{"required": [name]} for name in names]} for names in several]
    return schema


def classes_in(cls: Any) -> set[Any]:
    """The request class, and those that its fields have."""
    found = {cls}
    for field in attrs.fields(cls):
        if field.metadata.get("whole") is None and field.metadata.get("read") is None:
            for type_ in (types_of(cls)[field.name], *get_args(types_of(cls)[field.name])):
                if attrs.has(type_) and type_ not in found:
                    found |= classes_in(type_)
    return found
