"""Arguments of a call, whole and cut short."""

from __future__ import annotations

import json
from typing import Any

import jiter
from hypothesis import given, settings, strategies as st

from tests.support.json_values import JSON
from trioserve.api.base.cut_json import read_arguments


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), JSON), st.data())
def test_arguments_cut_short_are_read_as_the_sdk_reads_them(
    value: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    assert read_arguments(text) == value
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert read_arguments(cut) == jiter.from_json(cut.encode(), partial_mode=True)


def test_arguments_with_a_number_too_long_for_python() -> None:
    assert read_arguments('{"n": ' + "1" * 5000 + "}") == {"n": "1" * 5000}
    assert read_arguments("") == {}


def test_arguments_that_no_client_would_send() -> None:
    assert read_arguments("[1]]]") == [1]
    assert read_arguments("[" * 100_000 + "1," * 100_000) == {}
