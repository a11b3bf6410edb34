"""The tools of an MCP server that are kept."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies as st

from tests.support.json_values import JSON
from trioserve.tools.mcp.listing import MAX_BYTES, MAX_TOOLS, MAX_VALUES, Listing


def described(name: str = "good", schema: object = None, **fields: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object"} if schema is None else schema, **fields}


def listed(*tools: object) -> Listing:
    listing = Listing()
    listing.add(list(tools))
    return listing


def names_of(listing: Listing) -> list[str]:
    return [tool.name for tool in listing.tools]


@pytest.mark.parametrize(
    "dialect", ["http://[::1", 5, None, [], "urn:x", "http://json-schema.org/"]
)
def test_the_dialect_of_a_schema_is_ignored(dialect: object) -> None:
    listing = listed(described("odd", {"$schema": dialect, "properties": {"a": {}}}), described())
    assert names_of(listing) == ["odd", "good"]
    assert listing.tools[0].parameters == {"type": "object", "properties": {"a": {}}}


ODD: tuple[object, ...] = (
    5,
    None,
    {},
    described("x" * 300),
    {"name": 7},
    described("odd", {"properties": {"a": {"type": "text"}}}),
    described("odd", {"properties": [1]}),
    described("odd", {"required": [[i] for i in range(9000)]}),
    described("odd", {"anyOf": []}),
    described("odd", {"maximum": 10**400}),
    described("odd", execution={"taskSupport": "required"}),
    described("odd", description="x" * 2**16),
    described("odd", title={}),
    described("odd", annotations=3),
)


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_tool_is_skipped_alone(odd: object) -> None:
    listing = listed(odd, described(), odd)
    assert names_of(listing) == ["good"]
    assert len(listing.problems) == 2


def test_a_schema_that_is_nested_too_deeply() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"not": schema}
    assert names_of(listed(described("odd", schema), described())) == ["good"]


def test_what_is_kept_of_a_tool() -> None:
    hints = {"readOnlyHint": True, "title": "Of the hints", "more": [1]}
    tool = described("a", description="Does it", annotations=hints, outputSchema={"x": 1}, _meta={})
    (kept,) = listed(tool).tools
    assert (kept.description, kept.title, kept.reads_only) == ("Does it", "Of the hints", True)
    assert listed({**tool, "title": "Own"}).tools[0].title == "Own"


def test_a_budget_of_bytes_and_values_and_tools() -> None:
    for tool in (
        described(description="x" * 60_000),
        described(schema={"enum": [[] for _ in range(900)]}),
        described(),
    ):
        listing = Listing()
        n_pages = 0
        while not listing.is_full:
            listing.add([tool] * 10)
            n_pages += 1
        assert 1 < n_pages <= MAX_TOOLS / 10 + 1
        assert 0 < len(listing.tools) <= MAX_TOOLS
        assert sum(len(one.description) for one in listing.tools) <= MAX_BYTES
        assert sum(len(one.parameters.get("enum", ())) for one in listing.tools) <= MAX_VALUES


def test_pages_of_tools_that_are_too_large_have_an_end() -> None:
    listing, n_pages = Listing(), 0
    while not listing.is_full:
        listing.add([described(), described("large", description="x" * 5_000_000)])
        n_pages += 1
    assert n_pages == 4
    assert names_of(listing) == ["good"] * 4


KEYWORDS = st.sampled_from(
    ["type", "properties", "required", "items", "enum", "const", "anyOf", "not", "minLength",
     "pattern", "$ref", "$defs", "additionalProperties", "minimum", "prefixItems", "description"]
)  # fmt: skip
LEAVES = st.one_of(
    JSON, st.sampled_from(["string", "object", ["string", "null"], ["a"], True, 0, -1, ""])
)
SCHEMAS = st.recursive(
    st.dictionaries(KEYWORDS, LEAVES, max_size=3),
    lambda inner: st.dictionaries(
        KEYWORDS,
        inner | st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    ),
    max_leaves=8,
)


META = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)


@given(SCHEMAS)
def test_a_schema_is_judged_as_the_metaschema_does(schema: dict[str, Any]) -> None:
    schema["type"] = "object"
    errors = list(META.iter_errors(schema))
    # A list of schemas in `items` is allowed, as in older dialects. What an address or a pattern
    # looks like, and whether a list has a value twice, is not checked.
    lenient = ("uniqueItems", "pattern", "format")
    is_kept = bool(listed(described(schema=schema)).tools)
    assert is_kept or errors
    if is_kept:
        assert all(one.validator in lenient or "items" in one.absolute_path for one in errors)
