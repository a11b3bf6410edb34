"""Every keyword of JSON Schema, from draft 4 to 2020-12, and its effect on a grammar.

What is not in the table is no keyword: JSON Schema takes it for an annotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import attrs

#: The formats of text that llguidance knows.
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "time", "uri", "uuid"),
    }
)
#: Beyond this, llguidance has no numbers: a larger bound counts as this one.
MAX_BOUND = 92 * 10**17
#: Members that others depend on: llguidance writes out all combinations.
MAX_DEPENDENT = 6


class Effect(Enum):
    """The effect of a keyword."""

    ENFORCED = "enforced"
    NONE = "no effect, by definition"
    REFUSED = "refused"


#: Recognizes values of a keyword that say nothing in their schema.
_IsSilent = Callable[[Any, Mapping[str, Any]], bool]


def says_anything(schema: object) -> bool:
    """True if a schema plainly allows every value."""
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() & SAYING)


def _never(value: Any, schema: Mapping[str, Any]) -> bool:
    return False


def _always(value: Any, schema: Mapping[str, Any]) -> bool:
    return True


def _zero(value: Any, schema: Mapping[str, Any]) -> bool:
    return value is not False and value == 0


def _strings(value: Any, schema: Mapping[str, Any]) -> bool:
    """Names are strings anyway."""
    if isinstance(value, Mapping) and value.get("type") in ("string", ["string"]):
        value = {key: one for key, one in value.items() if key != "type"}
    return says_anything(value)


def _other_properties(value: Any, schema: Mapping[str, Any]) -> bool:
    return says_anything(value) or "additionalProperties" in schema


def _other_items(value: Any, schema: Mapping[str, Any]) -> bool:
    has_others = "additionalItems" if isinstance(schema.get("items"), list) else "items"
    return says_anything(value) or has_others in schema


def _unique(value: Any, schema: Mapping[str, Any]) -> bool:
    return value is False or schema.get("maxItems") in (0, 1)


def _without_branches(value: Any, schema: Mapping[str, Any]) -> bool:
    return all(says_anything(schema.get(word, True)) for word in ("then", "else"))


def _branch(value: Any, schema: Mapping[str, Any]) -> bool:
    return "if" not in schema or says_anything(value)


def _contains(value: Any, schema: Mapping[str, Any]) -> bool:
    return _zero(schema.get("minContains"), schema) and "maxContains" not in schema


def _how_many(value: Any, schema: Mapping[str, Any]) -> bool:
    return "contains" not in schema or _contains(value, schema)


def _dependencies(value: Any, schema: Mapping[str, Any]) -> bool:
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    return isinstance(value, Mapping) and all(
        all(name in required for name in one) if isinstance(one, list) else says_anything(one)
        for one in value.values()
    )


@attrs.frozen
class Keyword:
    """A keyword.

    Args:
        name: of the keyword.
        effect: of the keyword.
        about: the forms in which it is enforced, if not in all; the others are refused.
        silent: values that say nothing: the keyword is left out.
        says_nothing: recognizes these values.
    """

    name: str
    effect: Effect
    about: str = ""
    silent: str = ""
    says_nothing: _IsSilent = _never


def _enforced(
    *names: str, about: str = "", silent: str = "", says_nothing: _IsSilent = _never
) -> list[Keyword]:
    return [Keyword(name, Effect.ENFORCED, about, silent, says_nothing) for name in names]


def _refused(*names: str, silent: str = "", says_nothing: _IsSilent = _never) -> list[Keyword]:
    return [Keyword(name, Effect.REFUSED, "", silent, says_nothing) for name in names]


def _notes(*names: str, says_nothing: _IsSilent = _never) -> list[Keyword]:
    return [Keyword(name, Effect.NONE, says_nothing=says_nothing) for name in names]


_ANYTHING = "`true`, `{}`"
_COUNTED = "all `properties` are required"
_BEYOND = ": beyond ±9.2·10¹⁸, it counts as that"

KEYWORDS: Mapping[str, Keyword] = {
    one.name: one
    for one in (
        *_enforced("type", "enum", "const", "allOf", "anyOf"),
        *_enforced("oneOf", about="no value can match two of the alternatives"),
        *_enforced("$ref", about="it leads to a place in the same schema"),
        *_enforced("properties", "required", "additionalProperties"),
        *_enforced("patternProperties", about="no name can match two of the patterns"),
        *_enforced("minProperties", about=_COUNTED, silent="`0`", says_nothing=_zero),
        *_enforced("maxProperties", about=_COUNTED),
        *_enforced(
            "propertyNames",
            about="it has `enum` or `const`; `pattern` or lengths, without `properties` beside it",
            silent=f"{_ANYTHING}, any string",
            says_nothing=_strings,
        ),
        *_enforced(
            "unevaluatedProperties",
            about="all other `properties` are named here, or in `allOf` and `$ref`",
            silent=f"{_ANYTHING}, or beside `additionalProperties`",
            says_nothing=_other_properties,
        ),
        *_enforced("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *_enforced(
            "unevaluatedItems",
            about="no keyword combines schemas beside it",
            silent=f"{_ANYTHING}, or beside `items`",
            says_nothing=_other_items,
        ),
        *_enforced("minLength", "maxLength", "multipleOf"),
        *_enforced(
            "pattern", about="it has no backreference, and looks ahead at its beginning only"
        ),
        *_enforced(
            "format",
            about=f": {', '.join(f'`{name}`' for name in sorted(FORMATS))}; "
            "another one has no effect, and a line in the log",
        ),
        *_enforced(
            *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
            about=_BEYOND,
        ),
        *_enforced(
            "not",
            about=f"it has {_ANYTHING}: no value is allowed",
            silent="`false`",
            says_nothing=lambda value, schema: value is False,
        ),
        *_notes("$schema", "$id", "id", "$anchor", "$defs", "definitions", "$comment"),
        *_notes("$vocabulary", "$dynamicAnchor", "$recursiveAnchor", says_nothing=_always),
        *_notes("title", "description", "default", "examples"),
        *_notes("deprecated", "readOnly", "writeOnly"),
        *_notes("contentEncoding", "contentMediaType", "contentSchema"),
        *_refused("if", silent="without `then` and `else`", says_nothing=_without_branches),
        *_refused("then", "else", silent=f"without `if`; {_ANYTHING}", says_nothing=_branch),
        *_refused("contains", silent="with `minContains: 0` only", says_nothing=_contains),
        *_refused(
            "minContains", "maxContains", silent="without `contains`", says_nothing=_how_many
        ),
        *_refused("uniqueItems", silent="`false`; at most one item", says_nothing=_unique),
        *_enforced(
            *("dependencies", "dependentRequired", "dependentSchemas"),
            about=f"at most {MAX_DEPENDENT} names are in it",
            silent=f"only {_ANYTHING}, or names that are required anyway",
            says_nothing=_dependencies,
        ),
        *_refused("$dynamicRef", "$recursiveRef"),
        *_refused("disallow", "divisibleBy", "extends"),  # draft 3
        *_refused("x-guidance"),  # options of llguidance, which clients may not set
    )
}
#: Those that can change which values a schema allows.
SAYING = frozenset(one.name for one in KEYWORDS.values() if one.effect is not Effect.NONE)
REFUSED = frozenset(one.name for one in KEYWORDS.values() if one.effect is Effect.REFUSED)
#: Enforced in some forms, which `plain` writes in other keywords: what it leaves is refused.
PARTLY = frozenset(
    {
        *("propertyNames", "unevaluatedProperties", "unevaluatedItems", "not"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
    }
)
#: Keywords without which a schema has a wider meaning, and not another one.
NARROWING = (REFUSED | PARTLY) - {"$dynamicRef", "$recursiveRef", "extends", "x-guidance"}
