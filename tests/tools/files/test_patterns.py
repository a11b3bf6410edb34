"""Globs and regular expressions."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from trioserve.errors import ToolFileError
from trioserve.tools.files.patterns import Filter, Glob, LinePattern


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("*.py", "a.py", True),
        ("*.py", "a/b.py", True),
        ("*.py", "a.pyc", False),
        ("?", "é", True),
        ("?", "", False),
        ("src/*.py", "src/a.py", True),
        ("src/*.py", "x/src/a.py", True),
        ("src/*.py", "src/x/a.py", False),
        ("src/**/*.py", "src/a.py", True),
        ("src/**/*.py", "src/x/y/a.py", True),
        ("src/**", "src/x/y", True),
        ("**", "a/b", True),
        ("**/a", "a", True),
        ("/a", "a", False),
        ("a**b", "a-b", True),
        ("[ab]x", "bx", True),
        ("[!ab]x", "bx", False),
        ("[^ab]x", "cx", True),
        ("[!a]*", "b", True),
        ("d[!a]e/f", "d/e/f", False),
        ("[a-c]", "b", True),
        ("[c-a]", "b", False),
        ("[c-a]", "-", True),
        ("[]]", "]", True),
        ("[-a]", "-", True),
        ("[a", "[a", True),
        ("[\\]", "\\", True),
        ("a.b", "axb", False),
        ("(a|b)+", "(a|b)+", True),
        ("a\nb", "a\nb", True),
        ("*", "a\nb", True),
        ("caf\u00e9", "café", True),
        ("*", "\udcff", True),
    ],
)
def test_globs(glob: str, path: str, expected: bool) -> None:
    assert Glob(glob).matches(path) is expected


def test_a_filter_includes_and_excludes() -> None:
    assert Filter("**", "").has("a")
    assert not Filter("*.py", "").has("a")
    assert not Filter("*.py", "test_*").has("test_a.py")
    assert Filter("*.py", "test_*").has("a.py")


def forever() -> bool:
    return True


@given(
    st.lists(st.text("ab", max_size=6), max_size=20),
    st.sampled_from(["a+b", "^a", "b$", "^$", "a|^b", r"\ba", "^ab$", "a*", r"b\z"]),
    st.integers(1, 12),
    st.integers(0, 20),
)
def test_a_search_in_pieces_finds_the_same(
    lines: list[str], expression: str, step: int, begin: int
) -> None:
    data = "\n".join(lines).encode()
    begin = data.rfind(b"\n", 0, begin) + 1
    pattern, whole = LinePattern(expression), LinePattern(expression)
    pattern._step = step
    found, expected = pattern.find(data, begin, forever), whole.find(data, begin, forever)
    assert found == expected


def test_a_search_ends_when_it_may_not_go_on() -> None:
    asked = []

    def may_go_on() -> bool:
        asked.append(True)
        return len(asked) < 3

    pattern = LinePattern("x")
    pattern._step = 10
    assert pattern.find(b"abcdefgh\n" * 100 + b"x", 0, may_go_on) is None
    assert len(asked) == 3


def test_lines_that_are_too_long_for_a_large_expression_are_skipped() -> None:
    pattern = LinePattern("[ab]{0,900}" * 5 + "c")
    assert 1000 < pattern.max_line < 100_000
    long = b"a" * (pattern.max_line + 1) + b"c\n"
    assert pattern.find(b"abab\n" + long + b"abc\n", 0, forever) == 5 + len(long)
    assert pattern.has_skipped
    assert LinePattern("c").find(long, 0, forever) == pattern.max_line + 1


def test_a_large_expression_is_refused_before_it_takes_long() -> None:
    begin = time.thread_time()
    for pattern in ("[ab]{0,999}" * 60 + "c", r"(?i)[\pL]{500}", "é" * 10_000, "a" * 20_000):
        with pytest.raises(ToolFileError, match="invalid regex: "):
            LinePattern(pattern)
    assert time.thread_time() - begin < 1


def test_what_explodes_elsewhere_takes_linear_time() -> None:
    begin = time.thread_time()
    assert not Glob("*a" * 100 + "b").matches("a" * 255)
    assert LinePattern("(a*)*(a|aa)+b").find(b"a" * 100_000, 0, forever) is None
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize(
    "pattern", ["(?=a)", r"(a)\1", "a{2000}", "[z-a]", "\ud800", "*", "((a{100}){100}){100}"]
)
def test_an_invalid_or_costly_expression_is_refused(pattern: str) -> None:
    with pytest.raises(ToolFileError, match="invalid regex: "):
        LinePattern(pattern)


def test_an_error_shows_the_expression_as_it_was_given() -> None:
    with pytest.raises(ToolFileError, match=r"^invalid regex: missing \): a\($"):
        LinePattern("a(")
