"""The comparison with llama-server, `docs/reference.toml`, is true."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.docs_pages import read_page, tables

REFERENCE = tables.reference()
DESCRIBED = tables.described()
ROUTES = [(path, route) for route in REFERENCE["routes"] for path in route["paths"]]
HAVE = {f"{m.upper()} {path}" for path, methods in DESCRIBED["paths"].items() for m in methods}


def test_every_entry_says_how_it_compares() -> None:
    entries = [route["status"] for route in REFERENCE["routes"]]
    for fields in REFERENCE["fields"].values():
        entries += fields.values()
    for text in entries:
        kind, colon, why = text.partition(": ")
        assert kind in ("same", "differs", "not yet")
        assert bool(colon) is (kind != "same") is bool(why)


@pytest.mark.parametrize(("path", "route"), ROUTES, ids=[path for path, _ in ROUTES])
def test_a_route_is_there_unless_it_is_not_yet(path: str, route: Any) -> None:
    method, _, rest = path.partition(" ")
    there = any(_alike(rest, one) and one_method == method for one_method, one in _split())
    assert there is not route["status"].startswith("not yet")


def _split() -> list[tuple[str, str]]:
    return [(one.partition(" ")[0], one.partition(" ")[2]) for one in HAVE]


def _alike(a: str, b: str) -> bool:
    """Two paths are the same but for the names of their parameters."""
    first, second = a.split("/"), b.split("/")
    return len(first) == len(second) and all(
        one == other or (one[:1] == other[:1] == "{")
        for one, other in zip(first, second, strict=True)
    )


WITH_FIELDS = [(path, route) for path, route in ROUTES if "fields" in route]


@pytest.mark.parametrize(("path", "route"), WITH_FIELDS, ids=[path for path, _ in WITH_FIELDS])
def test_a_field_that_is_the_same_is_there(path: str, route: Any) -> None:
    own = tables.own_fields(path, DESCRIBED)
    assert own, "the handler has no @takes"
    known = {
        name: text for group in route["fields"] for name, text in REFERENCE["fields"][group].items()
    }
    same = {name for name, text in known.items() if text == "same"}
    assert same - own.keys() == set()
    not_yet = {name for name, text in known.items() if text.startswith("not yet")}
    assert not_yet & own.keys() == set()


def test_the_page_has_every_route_and_every_field() -> None:
    page = read_page("api.md")
    for path in HAVE:
        assert f"`{path}`" in page
    for path in HAVE:
        for name in tables.own_fields(path, DESCRIBED):
            assert f"`{name}`" in page, (path, name)
    for group in REFERENCE["fields"].values():
        for name in group:
            assert f"`{name}`" in page


def test_a_parameter_that_is_the_same_is_there() -> None:
    for path, route in ROUTES:
        method, _, rest = path.partition(" ")
        for name, text in route.get("query", {}).items():
            assert text == "same"
            assert any(
                one["name"] == name
                for other, methods in DESCRIBED["paths"].items()
                if _alike(rest, other)
                for one in methods.get(method.lower(), {}).get("parameters", ())
            ), (path, name)


def test_each_list_of_fields_is_used() -> None:
    used = {group for route in REFERENCE["routes"] for group in route.get("fields", ())}
    assert used == REFERENCE["fields"].keys()
