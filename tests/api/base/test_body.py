"""The bytes of a body into JSON."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.json_values import JSON
from trioserve.api.base.body import parse_object
from trioserve.errors import InvalidRequestError


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"nojson", b"[1]", b"null", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\xff"}'),
        *(b'{"a": "\\ud800"}', b'{"\\uDC00": 1}', b'{"a": 1' + b"0" * 5000 + b"}"),
        b'{"a":' * 100_000,
    ],
)
def test_only_json_objects_are_accepted(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_object(data)


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


@given(st.binary())
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(parse_object(data), dict)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_json_of_dumps_is_read(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value
