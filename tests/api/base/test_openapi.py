"""``/openapi.json`` describes what the app serves, as the app would check it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from jsonschema import Draft202012Validator

from tests.support.clients import client_of
from trioserve.api import openapi
from trioserve.api.base import limits, request_schemas
from trioserve.api.base.answers import Answer
from trioserve.api.base.fields import NAME, field, fields_of, json_type, list_schema
from trioserve.app import create_app
from trioserve.errors import TrioServeError

APP = create_app()
ROUTES = APP.state.routes
DESCRIBED = openapi.describe(ROUTES)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DESCRIBED["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_is_in_it() -> None:
    described = {(path, method.upper()) for path, method, _ in operations()}
    assert described == {(openapi.path_of(one.path), one.method) for one in ROUTES}
    assert ("/v1/chat/completions", "POST") in described
    assert ("/v1/stream/{id_}", "DELETE") in described


def test_every_route_with_a_body_says_what_it_takes() -> None:
    silent = {
        one.path
        for one in ROUTES
        if one.method in ("POST", "PUT", "PATCH") and not hasattr(one.handler, "takes")
    }
    assert silent == set(), "add @takes(...) of trioserve.api.openapi to the handler"


def test_every_route_says_what_it_answers() -> None:
    for path, method, operation in operations():
        answers = {
            status: answer
            for status, answer in operation["responses"].items()
            if status.startswith("2")
        }
        assert answers, (path, method, "add @gives(...) of trioserve.api.openapi to the handler")
        for status, answer in answers.items():
            kinds = answer.get("content", {})
            is_empty = status == "204" or path == "/api/delete"  # Ollama's is an empty 200
            assert bool(kinds) is not is_empty, (path, method, status)
            assert all(kind["schema"] for kind in kinds.values()), (path, method, status)


def taken() -> set[Any]:
    """The classes of the bodies of all routes."""
    found = {one.takes for one in ROUTES} - {None}
    assert found
    return found


def test_every_field_of_a_request_class_is_in_it() -> None:
    for cls in set[Any]().union(*(request_schemas.classes_in(one) for one in taken())):
        properties = DESCRIBED["components"]["schemas"][cls.__name__]["properties"]
        for each in fields_of(cls):
            if each.whole is None:
                names = {name for name in each.names if f"{name}[]" not in each.names}
                assert names <= properties.keys(), (cls, each.name)
            else:
                assert hasattr(each.whole, "json_properties"), (cls, each.name, "add json_type")
                assert each.whole.json_properties.keys() <= properties.keys()


def test_every_reader_has_a_schema() -> None:
    for cls in taken():
        for each in fields_of(cls):
            if each.whole is None:
                assert each.schema is not None, (cls, each.name)


def test_the_names_of_operations_are_unique() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names))
    assert all(operation["summary"].endswith(".") for _, _, operation in operations())


def test_the_names_of_answers_are_unique() -> None:
    def below(cls: type[Answer]) -> Iterator[type[Answer]]:
        for one in cls.__subclasses__():
            yield one
            yield from below(one)

    assert set(below(Answer)) == set(Answer.known.values())


def test_every_reference_leads_somewhere() -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            value = list(value.values())
        for each in value if isinstance(value, list) else ():
            yield from references(each)

    for reference in set(references(DESCRIBED)):
        found: Any = DESCRIBED
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]


def test_the_schemas_are_json_schema() -> None:
    for schema in DESCRIBED["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_bounds_and_defaults_are_those_of_the_classes() -> None:
    fields = DESCRIBED["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["top_p"] == {"type": ["number", "null"], "minimum": 0.0, "default": 0.95}
    assert fields["stream"] == {"type": ["boolean", "null"], "default": False}
    assert fields["max_completion_tokens"]["description"].startswith("Another name of ")
    required = DESCRIBED["components"]["schemas"]["ChatRequest"]["required"]
    assert required == ["messages"]


def test_every_status_of_an_error_is_in_it() -> None:
    def kinds(kind: type[TrioServeError]) -> Iterator[type[TrioServeError]]:
        yield kind
        for child in kind.__subclasses__():
            if child.__module__.startswith("trioserve."):
                yield from kinds(child)

    statuses = {str(kind.status) for kind in kinds(TrioServeError)}
    assert statuses == DESCRIBED["components"]["responses"].keys()


def test_public_routes_need_no_key() -> None:
    public = {path for path, _, operation in operations() if operation.get("security") == []}
    assert {"/health", "/v1/health"} <= public
    assert "/v1/chat/completions" not in public


@attrs.frozen(kw_only=True)
class _Inner:
    a: int | None = None


@attrs.frozen(kw_only=True)
class _Outer:
    inner: _Inner | None = None
    words: tuple[str, ...] = field("w", "words")
    kind: str = field(read=json_type({"enum": ["x", "y"]})(lambda value: value), default="x")


def test_the_schema_of_a_class() -> None:
    words = list_schema(NAME, limits.MAX_INPUTS)
    assert request_schemas.of_class(_Outer) == {
        "type": "object",
        "properties": {
            "inner": {"anyOf": [{"$ref": "#/components/schemas/_Inner"}, {"type": "null"}]},
            "w": words,
            "words": {**words, "description": "Another name of w, which wins."},
            "kind": {"enum": ["x", "y", None], "default": "x"},
        },
        "allOf": [{"anyOf": [{"required": ["w"]}, {"required": ["words"]}]}],
    }
    assert request_schemas.classes_in(_Outer) == {_Outer, _Inner}


@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_it_is_served(keys: tuple[str, ...]) -> None:
    async with client_of(api_keys=keys, api_prefix="/llm") as client:
        if keys:
            assert (await client.get("/llm/openapi.json")).status_code == 401
            client.headers["x-api-key"] = "key"
        answer = (await client.get("/llm/openapi.json")).json()
        assert answer["openapi"] == "3.1.0"
        assert answer["servers"] == [{"url": "/llm"}]
        assert bool(answer["security"]) is bool(keys)
        assert answer["paths"].keys() == DESCRIBED["paths"].keys()
