"""The fields of all requests accept the values of their schemas and have maxima."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.clients import client_of
from tests.support.scripts import BASE, answering
from trioserve.api.base import limits
from trioserve.api.base.fields import (
    MAX_CHARS,
    RequestBody,
    check_of,
    fields_of,
    list_schema,
    structure,
)
from trioserve.api.base.request_schemas import classes_in, of_fields
from trioserve.api.base.routes import FORM
from trioserve.app import create_app, create_router
from trioserve.config import Config
from trioserve.errors import InvalidRequestError

BOUNDS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


ROUTES = [
    route for app in (create_app(), create_router(Config(), Mock())) for route in app.state.routes
]


def request_classes() -> set[Any]:
    """The classes of the bodies of all routes of a server and of a router, and their parts."""
    return set[Any]().union(*(classes_in(each.takes) for each in ROUTES if each.takes is not None))


def schemas() -> Iterator[tuple[str, Any]]:
    """The schema of each field of each request class, by the names of both."""
    for cls in sorted(request_classes(), key=lambda cls: str(cls.__name__)):
        for field in fields_of(cls):
            parts = {field.name: field.schema} if field.inner is None else {}
            for name, schema in (field.whole.json_properties if field.whole else parts).items():
                yield f"{cls.__name__}.{name}", schema


SCHEMAS = dict(schemas())


def kinds_of(schema: Any) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


# -- types and ranges

#: A value of each type.
ODD: dict[str, Any] = {
    "string": "odd", "number": 0.5, "boolean": True, "array": [[0.5]], "object": {"odd": 1},
}  # fmt: skip

#: Forms, and classes with fields that are read only beside others.
LEFT_OUT = {
    *("ResponsesRequest", "CompactRequest", "MessageBatchRequest", "TokenizeRequest"),
    *(route.takes.__name__ for route in ROUTES if route.content == FORM),
}

#: Fields that a body needs beside `BASE`.
NEEDED: dict[str, dict[str, Any]] = {
    "Amount": {"type": "tool_uses", "value": 1},
    "BatchRequest": {
        "input_file_id": "a",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    },
    "ChatChange": {"metadata": {}},
    "CompactionOptions": {"type": "summarize"},
    "ConversationChange": {"metadata": {}},
    "ItemsRequest": {"items": []},
    "ApproveRequest": {"call_id": "a", "approve": True},
    "CallRequest": {"tool": "a"},
    "CohereEmbedRequest": {"texts": ["a"]},
    "LoadAdapterRequest": {"lora_name": "a", "lora_path": "a"},
    "LookupRequest": {"conversation_ids": ["a"]},
    "ScoreRequest": {"text_1": "a", "text_2": "b"},
    "StopRequest": {"call_id": "a"},
    "ThinkingOptions": {"type": "auto"},
    "OutputFormat": {"type": "json_schema", "schema": {}},
    "UnloadAdapterRequest": {"lora_name": "a"},
    "WebFetchRequest": {"url": "a"},
}


def takes(schema: Any, kind: str) -> bool:
    """Check if a schema may accept the value of a type in `ODD`."""
    if "anyOf" in schema:
        return any(takes(one, kind) for one in schema["anyOf"])
    if "enum" in schema:
        return kind == "boolean" and True in schema["enum"]
    return kind in kinds_of(schema)


def misfits(cls: Any) -> Iterator[tuple[str, Any]]:
    """Values that a class does not take, by the fields that they stand in."""
    for field in fields_of(cls):
        given = {"type": "object"} if field.inner is not None else field.schema
        schemas = {field.names[0]: given} if field.whole is None else field.whole.json_properties
        for name, schema in schemas.items():
            if name == "model":  # while there is one, anything is taken for its name
                continue
            yield from ((name, ODD[kind]) for kind in ODD if not takes(schema, kind))
            if field.whole is None and "minimum" in schema:
                yield name, schema["minimum"] - 1
            if field.whole is None and "maximum" in schema:
                yield name, schema["maximum"] + 1


REQUESTS = {one.__name__: one for one in request_classes() if one.__name__ not in LEFT_OUT}


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_a_value_outside_its_schema_is_refused_by_its_name(name: str) -> None:
    cls = REQUESTS[name]
    parse = cls.parse if issubclass(cls, RequestBody) else lambda body: structure(cls, body)
    body = {**BASE, **NEEDED.get(name, {})}
    body = {one: body[one] for one in of_fields(cls) if one in body}
    parse(body)
    for field, value in misfits(cls):
        others = {one: body[one] for one in body if one != field}
        with pytest.raises(InvalidRequestError) as caught:
            parse({**others, field: value})
        assert (caught.value.param or "").startswith(field), value


# -- maximums


def unbounded(schema: Any, path: str) -> Iterator[str]:
    """The places in a schema where a value may be as long as it likes."""
    if "$ref" in schema or "enum" in schema or "const" in schema:
        return
    kinds = kinds_of(schema)
    inner: dict[str, Any] = dict(schema.get("properties", {}))
    if not kinds and "anyOf" not in schema and not inner:
        yield f"{path} takes anything"
    for kind in kinds:
        is_bounded = BOUNDS.get(kind, kind) in schema or MAX_CHARS in schema or kind not in BOUNDS
        is_known = kind == "object" and inner and "additionalProperties" not in schema
        if not (is_bounded or is_known):
            yield f"{path}: {kind}"
    if MAX_CHARS in schema:
        return
    inner |= {"[]": schema["items"]} if "items" in schema else {}
    inner |= {"*": others} if (others := schema.get("additionalProperties")) else {}
    inner |= {f"|{i}": one for i, one in enumerate(schema.get("anyOf", ()))}
    if "array" in kinds and "items" not in schema:
        yield f"{path}: items of any kind"
    for name, one in inner.items():
        yield from unbounded(one, f"{path}.{name}")


def test_every_text_list_and_object_in_a_request_has_a_maximum() -> None:
    """If this fails, give the field a bound of `limits` in its reader or its schema."""
    assert len(SCHEMAS) > 200
    found = [place for path, schema in SCHEMAS.items() for place in unbounded(schema, path)]
    assert found == []


def test_the_walk_finds_what_has_no_maximum() -> None:
    assert list(unbounded({"type": "string"}, "a")) == ["a: string"]
    assert list(unbounded({"type": "object"}, "a")) == ["a: object"]
    assert list(unbounded({}, "a")) == ["a takes anything"]
    nested = {"type": "object", "properties": {"b": list_schema({"type": ["string", "null"]}, 3)}}
    assert list(unbounded(nested, "a")) == ["a.b.[]: string"]
    assert list(unbounded({"type": "array", "maxItems": 3}, "a")) == ["a: items of any kind"]


def too_long(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Values that a schema does not allow, one for each bound: where the fault is, and the value.

    Of bounds that would take much memory there are few, and they have the same check.
    """
    if (limit := schema.get("maxLength", 2**30)) < 2**24:
        yield path, "x" * (limit + 1)
    if (limit := schema.get("maxItems", 2**30)) < 2**20:
        yield path, [0] * (limit + 1)
    if (limit := schema.get("maxProperties")) is not None:
        yield path, dict.fromkeys(map(str, range(limit + 1)), "")
    if (limit := schema.get(MAX_CHARS, 2**30)) < 2**24:
        yield path, {"a": "x" * limit}
    if "items" in schema:
        for place, value in too_long(schema["items"], f"{path}[1]"):
            yield place, [{}, value]
    for name, one in schema.get("properties", {}).items():
        for place, value in too_long(one, f"{path}.{name}"):
            yield place, {name: value}


def test_every_maximum_is_checked() -> None:
    n_checked = 0
    for field, schema in SCHEMAS.items():
        check = check_of(schema)
        for place, value in too_long(schema, field):
            assert check is not None
            with pytest.raises(InvalidRequestError, match="at most") as caught:
                check(value, field)
            assert caught.value.param == place
            n_checked += 1
    assert n_checked > 200


def test_a_union_accepts_each_of_its_forms() -> None:
    short = {"type": ["string", "array"], "maxLength": 3, "maxItems": 5}
    check = check_of({"anyOf": [short, list_schema(short, 2), {"type": "boolean"}]})
    assert check is not None
    for value in ("abc", [1] * 5, ["abc"] * 2, True, None, 5, {"a": "abcd"}):
        check(value, "x")
    for value in ("abcd", [1] * 6, ["abcd"] * 6):
        with pytest.raises(InvalidRequestError):
            check(value, "x")


def test_the_names_and_values_of_an_object_without_known_fields() -> None:
    check = check_of({"propertyNames": {"maxLength": 2}, "additionalProperties": {"maxLength": 3}})
    assert check is not None
    check({"ab": "abc"}, "x")
    check("abcd", "x")
    with pytest.raises(InvalidRequestError, match=r"'x\.a' must be a string of at most 3"):
        check({"a": "abcd"}, "x")
    with pytest.raises(InvalidRequestError, match="'x' must be a string of at most 2 characters"):
        check({"abc": ""}, "x")


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": "Hi", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ("/v1/responses", {"input": "Hi", "metadata": {"a": "x" * 513}}, "metadata.a"),
        ("/v1/responses", {"input": "Hi", "metadata": {"x" * 65: ""}}, "metadata"),
        (
            "/v1/chat/completions",
            {**CHAT, "trioserve_run_tools": {"tools": ["*"] * 129}},
            "trioserve_run_tools.tools",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "trioserve_run_tools": {"tools": ["*" * 129]}},
            "trioserve_run_tools.tools[0]",
        ),
        ("/v1/chat/completions", {**CHAT, "model": "x" * 2000}, "model"),
        ("/v1/streams/lookup", {"conversation_ids": ["a" * 1025]}, "conversation_ids[0]"),
        ("/completion", {"prompt": "a", "grammar": "x" * (limits.MAX_SCHEMA + 1)}, "grammar"),
    ],
    ids=range(8),
)
async def test_a_request_with_too_much(path: str, body: dict[str, Any], param: str) -> None:
    async with client_of(answering("x")) as client:
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "at most" in answer.json()["error"]["message"]


async def test_metadata_within_openais_bounds() -> None:
    metadata = {f"{i:064}": "x" * 512 for i in range(limits.MAX_METADATA)}
    async with client_of(answering("x")) as client:
        answer = await client.post("/v1/responses", json={"input": "Hi", "metadata": metadata})
        assert answer.json()["metadata"] == metadata
