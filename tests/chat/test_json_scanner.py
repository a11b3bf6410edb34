"""The incremental scanner of JSON values."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from trioserve.chat.json_scanner import MAX_DEPTH, JsonScanner, State


def scan(text: str) -> tuple[State, int]:
    scanner = JsonScanner()
    end = scanner.feed(text)
    if scanner.state is State.OPEN:
        scanner.finish()
    return scanner.state, end


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '""', "0", "-1.5e+10", "true", "null", '{"a": [1, {"b": "\\"}"}], "d": {}}'],
)
def test_a_value_is_read_to_its_end(text: str) -> None:
    assert scan(text) == (State.DONE, len(text))
    assert scan(f"[{text} , {text}]x") == (State.DONE, 2 * len(text) + 5)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("}", 0),
        ("{]", 1),
        ("{,", 1),
        ('{"a" 1}', 5),
        ('{"a": 1,}', 8),
        ("[1,]", 3),
        ("[1 2]", 3),
        ("nil", 1),
        ("True", 0),
        ("01 ", 2),
        ("1.x", 2),
        (r'"\x"', 2),
        (r'"\u12g4"', 5),
        ('{"a"}', 4),
        ("[}", 1),
    ],
)
def test_a_fault_is_found_where_it_is(text: str, at: int) -> None:
    assert scan(text) == (State.FAILED, at)


def test_depth_is_limited() -> None:
    assert scan("[" * MAX_DEPTH + "]" * MAX_DEPTH)[0] is State.DONE
    assert scan("[" * (MAX_DEPTH + 1)) == (State.FAILED, MAX_DEPTH)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}[]",:\\ u0123456789.-+eEtrufalsn\n', max_size=25))
def test_it_agrees_with_the_json_module(text: str) -> None:
    state, end = scan(text)
    try:
        json.loads(text, strict=False)
    except ValueError:
        assert state is not State.DONE or text[end:].strip(" \t\r\n")
    else:
        assert state is State.DONE


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=10), st.text(max_size=10))
def test_control_characters_become_escapes(first: str, second: str) -> None:
    raw = json.dumps(first)[:-1] + "\n\x00" + json.dumps(second)[1:]
    scanner = JsonScanner()
    scanner.feed(raw)
    assert json.loads(scanner.text) == first + "\n\x00" + second
