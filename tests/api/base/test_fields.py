"""JSON bodies into request classes."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.json_values import JSON
from trioserve.api.base.fields import field, integer, structure
from trioserve.errors import InvalidRequestError


@attrs.frozen(kw_only=True)
class Inner:
    flag: bool = False


@attrs.frozen(kw_only=True)
class Outer:
    count: int
    share: float = 0.5
    words: tuple[str, ...] = ()
    inner: Inner = attrs.field(factory=Inner)
    limit: int | None = field("first", "second", default=None)
    keys: int = field(whole=len)
    anything: dict[str, Any] = attrs.field(factory=dict)


def test_a_body_becomes_an_object() -> None:
    body = {"count": 3.0, "words": ["a"], "inner": {"flag": True}, "second": 7, "unknown": 1}
    parsed = structure(Outer, body)
    assert parsed == Outer(count=3, words=("a",), inner=Inner(flag=True), limit=7, keys=5)
    assert isinstance(parsed.count, int)


def test_null_counts_as_absent_and_the_first_name_wins() -> None:
    assert structure(Outer, {"count": 1, "share": None}).share == 0.5
    assert structure(Outer, {"count": 1, "first": None, "second": 2}).limit == 2
    assert structure(Outer, {"count": 1, "first": 1, "second": 2}).limit == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "count"),
        ({"count": None}, "count"),
        ({"count": True}, "count"),
        ({"count": 1.5}, "count"),
        ({"count": "1"}, "count"),
        ({"count": 1, "share": "x"}, "share"),
        ({"count": 1, "share": False}, "share"),
        ({"count": 1, "words": "abc"}, "words"),
        ({"count": 1, "words": ["a", 1]}, "words"),
        ({"count": 1, "inner": []}, "inner"),
        ({"count": 1, "inner": {"flag": 1}}, "inner.flag"),
        ({"count": 1, "second": {}}, "second"),
        ({"count": 1, "anything": []}, "anything"),
    ],
)
def test_the_error_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        structure(Outer, body)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from([a.name for a in attrs.fields(Outer)]), JSON))
def test_structure_takes_it_or_names_a_field(body: dict[str, Any]) -> None:
    try:
        parsed = structure(Outer, body)
    except InvalidRequestError as error:
        assert error.param is not None  # noqa: PT017
    else:
        assert parsed.count == integer(body["count"])
