"""Long JSON is read as Python's own parser reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.clients import client_of
from tests.support.scripts import HI, answering
from trioserve.api.base import body, limits
from trioserve.api.base.body import LongReader, parse_json
from trioserve.errors import InvalidRequestError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=8),
    max_leaves=40,
)


def refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read(text: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_STEP", 64)
        return LongReader(text, refuse).read()


def outcome(read: Callable[[str], Any], text: str) -> tuple[Any, Exception | None]:
    try:
        return read(text), None
    except ValueError as error:
        return None, error


@settings(max_examples=50, deadline=None)
@given(value=JSON, indent=st.sampled_from([None, 0, 2]), ascii_=st.booleans())
def test_json_of_dumps_is_read(value: Any, indent: int | None, ascii_: bool) -> None:
    text = json.dumps([value] * 3, indent=indent, ensure_ascii=ascii_)
    assert read(f" {text}\n") == [value] * 3


@settings(max_examples=50, deadline=None)
@given(value=JSON, at=st.integers(0), letter=st.sampled_from('[]{},:"\\ 1eNx\0\t'))
def test_errors_are_those_of_the_parser(value: Any, at: int, letter: str) -> None:
    text = json.dumps({"a": [value] * 2, "b": value})
    at %= len(text)
    text = text[:at] + letter + text[at + 1 :]
    expected, error = outcome(partial(json.loads, parse_constant=refuse), text)
    value, own_error = outcome(read, text)
    assert (value, type(own_error)) == (expected, type(error))
    assert getattr(own_error, "pos", None) == getattr(error, "pos", None)


@pytest.mark.parametrize(
    "text", ["", " ", "[", "[1", "[1,", '{"a', '{"a":', '{"a":1', '"\\', '"\\u12', "{1", '{"a",']
)
def test_half_a_text_is_refused(text: str) -> None:
    for before in ("", "[" + "1," * 100, "[" + '"a",' * 100, '{"b":[' + "[1]," * 100):
        with pytest.raises(json.JSONDecodeError):
            read(before + text)


def test_pairs_of_surrogates_stay_together() -> None:
    for n in range(60, 70):
        text = "a" * n + "\N{GRINNING FACE}" * 5000 + "\\" * n
        assert LongReader(json.dumps(text), refuse).read() == text


@pytest.mark.parametrize(
    ("begin", "end", "filler", "leaf"),
    [
        ("[", "]", "", "1"),
        ('["b",{"a":', "}]", "", '"a"'),
        ("[", "]", "1," * 100_000, '"a"'),
        ('{"a":', "}", "1," * 100_000, "1"),
        ('["b",{"a":', "}]", "1," * 100_000, '"a"'),
    ],
    ids=["short lists", "short", "lists", "objects", "lists and objects"],
)
def test_json_has_so_many_levels(begin: str, end: str, filler: str, leaf: str) -> None:
    n = (limits.MAX_DEPTH - 1) // len(end)
    n_rest = limits.MAX_DEPTH - 1 - n * len(end)
    deep = "[" * n_rest + begin * n + leaf + end * n + "]" * n_rest
    parse_json(f"[{filler}{deep}]".encode())
    for bad in (f"[[{filler}{deep}]]", f"[{filler}[{deep}]]", f"[{filler}{'[' * 10**6}]"):
        with pytest.raises(InvalidRequestError, match=f"{limits.MAX_DEPTH} levels"):
            parse_json(bad.encode())


async def test_json_may_begin_with_a_byte_order_mark() -> None:
    for filler in ("", "1," * 100_000):
        assert parse_json(f"\ufeff[{filler}1]".encode())[-1] == 1
    async with client_of(answering("Hello.")) as client:
        body = f"\ufeff{json.dumps({'messages': HI})}".encode()
        answer = await client.post("/v1/chat/completions", content=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello."


@pytest.mark.parametrize("unit", ["1,", '"",', "[],", "[[]],"])
def test_a_body_has_so_many_values(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 70_000)
    parse_json(f"[{unit * (limits.MAX_VALUES // 8)}1]".encode())
    with pytest.raises(InvalidRequestError, match="values"):
        parse_json(f"[{unit * (limits.MAX_VALUES + 1)}1]".encode())


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ("\\ud83d", '["{}"]'),
        ("\\ude00", '{{"{}": 1}}'),
        ("\\ude00\\ud83d", '[[["a", {{"b": "{}"}}]]]'),
    ],
)
def test_half_a_pair_is_refused_wherever_it_is(bad: str, where: str) -> None:
    for filler in ("", "a" * 100_000):
        with pytest.raises(InvalidRequestError, match="surrogates"):
            parse_json(where.format(filler + bad).encode())


@pytest.mark.parametrize("value", [[[0] * 9] * 9, "a" * 99, {"a": "b" * 99}])
def test_reading_checks_for_cancellation(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancelled(BaseException):
        pass

    def check_cancelled() -> None:
        raise Cancelled

    monkeypatch.setattr(body, "check_cancelled", check_cancelled)
    with pytest.raises(Cancelled):
        read(json.dumps(value))
