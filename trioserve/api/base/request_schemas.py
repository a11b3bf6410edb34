"""Describes the JSON that request classes take, as JSON Schema, for `trioserve.api.openapi`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from trioserve.api.base.answers import COMPONENTS
from trioserve.api.base.fields import Field, Schema, fields_of, or_null


def of_fields(cls: Any, names: Iterable[str] | None = None) -> dict[str, Schema]:
    """The schemas of a class's fields by the names that they have in JSON."""
    found: dict[str, Schema] = {}
    for field in fields_of(cls, names):
        if field.whole is not None:
            found |= {name: or_null(one) for name, one in field.whole.json_properties.items()}
            continue
        first, *others = field.names
        found[first] = schema = _of_field(field)
        # In generated clients, a name with brackets is the same as one without.
        others = [name for name in others if f"{name}[]" != first]
        about = f"Another name of {first}, which wins."
        found |= {name: {**schema, "description": about} for name in others}
    return found


def _of_field(field: Field) -> Schema:
    schema = dict(field.schema)
    if field.inner is not None:
        schema = {"$ref": COMPONENTS + field.inner.__name__}
    low, high = getattr(field.attribute.validator, "bounds", (-math.inf, math.inf))
    schema |= {"minimum": low} if math.isfinite(low) else {}
    schema |= {"maximum": high} if math.isfinite(high) else {}
    if field.required:
        return schema
    if isinstance(field.attribute.default, bool | int | float | str):
        schema["default"] = field.attribute.default
    return or_null(schema)


def of_class(cls: Any) -> Schema:
    """The schema of a request class. Fields that it does not know are ignored, so may be there."""
    schema: Schema = {"type": "object", "properties": of_fields(cls)}
    required = [field.names for field in fields_of(cls) if field.required and field.whole is None]
    if only := [names[0] for names in required if len(names) == 1]:
        schema["required"] = only
    if several := [names for names in required if len(names) > 1]:
        schema["allOf"] = [{"anyOf": [{"required": [name]} for name in names]} for names in several]
    return schema


def classes_in(cls: Any) -> set[Any]:
    """The request class, and those that its fields have."""
    inner = [field.inner for field in fields_of(cls) if field.inner is not None]
    return {cls}.union(*map(classes_in, inner))
