"""Globs and regular expressions."""

from __future__ import annotations

import time

import pytest

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


def test_what_explodes_elsewhere_takes_linear_time() -> None:
    begin = time.thread_time()
    assert not Glob("*a" * 100 + "b").matches("a" * 255)
    assert LinePattern("(a*)*(a|aa)+b").find(b"a" * 100_000, 0) is None
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "a{2000}", "[z-a]", "\ud800", "*"])
def test_what_is_no_expression_is_refused(pattern: str) -> None:
    with pytest.raises(ToolFileError, match="invalid regex: "):
        LinePattern(pattern)


def test_an_error_shows_the_expression_as_it_was_given() -> None:
    with pytest.raises(ToolFileError) as caught:
        LinePattern("a(")
    assert caught.value.message == "invalid regex: missing ): a("


def test_an_expression_that_would_need_too_much_memory_is_refused() -> None:
    with pytest.raises(ToolFileError, match="invalid regex: "):
        LinePattern("((a{100}){100}){100}")
