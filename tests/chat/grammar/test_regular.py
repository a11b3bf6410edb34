"""A Lark grammar becomes one regular expression, and calls follow it in every notation."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.support.custom_tools import PATCH, PATCHES
from tests.support.message_writers import WRITERS
from tests.support.tool_grammars import REQUIRED, compiled, tail_of, taking
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.grammar.regular import (
    MAX_CHARS,
    GrammarError,
    _needed,
    _Seq,
    _Text,
    _tokens,
    check_expression,
    expression_of,
    pattern_of,
)
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.matcher import CompiledGrammar

SUMS = """
start: sum          // a comment
?sum: product (SP "+" SP product)* -> add
    | product
?product: atom (SP "*" SP atom)*
!atom: INT | "(" sum ")"
SP: " "
%import common.INT
"""
LISTS = """start: items
items: items "," ITEM
  | ITEM
ITEM.2: "a".."f" /[0-9]{1,2}/i ~ 1..2 | ["not" WS] WORD
%ignore /[ \\t]+/
%import common (WS, WORD)
"""


@pytest.mark.parametrize(
    ("grammar", "fits", "does_not"),
    [
        (
            PATCHES,
            [PATCH, f"{PATCH}\n", "*** Begin Patch\n*** Delete File: a b\n*** End Patch"],
            ["", "a patch", PATCH[:-1], f"{PATCH}\n\n", f" {PATCH}", PATCH.replace("+", "?")],
        ),
        (SUMS, ["1", "1 + 2 * 3 + 4", "((1 + 2) * 3)"], ["", "1 +2", "(1", "1 + ()"]),
        (LISTS, ["a1", " b12,c3 ,  not x", "a,b,c,d,e,f,g,h,i,j,k,l"], ["", "a1,", "a1 b2", "1"]),
        ('start: "(" start ")" | ""', ["", "(((())))"], ["(", "())"]),
        ('start: A start | A\nA: "a"i', ["aAaAaAaAaAaAaAaA"], ["", "ab"]),
        ('start: "\\"\\x41\\u00e9/\\n" /[\\/"]+/', ['"Aé/\n/"'], ['"Aé/\n']),
        ("start: X{2,3}\nX: /./s", ["ab", "\n\n\n"], ["a", "abcd"]),
    ],
)
def test_texts_of_a_grammar(grammar: str, fits: list[str], does_not: list[str]) -> None:
    expression = expression_of(grammar)
    assert len(expression) <= MAX_CHARS
    assert [text for text in fits if not re.fullmatch(expression, text)] == []
    assert [text for text in does_not if re.fullmatch(expression, text)] == []


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("begin: A", "has no rule 'start'"),
        ("start: A", "has no rule 'A'"),
        ("start: (A", "needs ')'"),
        ("start A", "needs ':'"),
        ('"a": A', "where a rule should begin"),
        ("start: A\n%import python.NAME", "imports from something else"),
        ("start: A\n%import common.NAME", "which 'common' does not have"),
        ("%declare A", "has '%declare', which is not supported"),
        ("start: /(/", "invalid regular expression"),
        ("start: /a(?=b)/", "with anchors, or one that looks around"),
        ("start: /^a$/", "with anchors"),
        ("start: ;", "cannot be read at ';'"),
        ('start: "ab".."c"', "which is not one character"),
        (f'start: "{"a" * 5000}"', "is longer than 4000 characters"),
        ("start: start", "is longer than 4000 characters"),
        (f"start: A //{' ' * 20_000}", "is longer than 16384 characters"),
        (
            "start: A" + "\na: A" * 3 + "".join(f"\na{n}: A" for n in range(300)),
            "more than 256 rules",
        ),
        (f"start: {'(' * 8000}A", "is nested too deeply"),
        (f"start: A{'?' * 8000}", "is nested too deeply"),
    ],
)
def test_what_no_expression_can_say(grammar: str, problem: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(problem)):
        expression_of(grammar)


def test_an_expression_is_for_all_of_a_text() -> None:
    assert pattern_of("regex", "a|b") == "^(?:a|b)$"
    for wrong in ("a(", r"\bword", "a" * 5000):
        with pytest.raises(GrammarError):
            pattern_of("regex", wrong)


#: Each would take hours, if the time were the square of a length.
LONG: dict[str, Callable[[], object]] = {
    "a count without an end": lambda: list(_tokens('"a" {' + " " * 2**20)),
    "brackets in a comment": lambda: check_expression(f"(?#{'[' * 2**20})"),
    "ways of a rule": lambda: _needed([_Seq((_Text("a"), _Text(f"{n}"))) for n in range(2**16)]),
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts_take_no_longer_than_their_length(name: str) -> None:
    with suppress(GrammarError):
        LONG[name]()


@pytest.mark.parametrize(
    "range_", [r"\0-\u{:04x}", r"\0-\U{:08x}", "\\0-{:c}", r"\\u0041\0-\u{:04x}"]
)
def test_a_class_costs_little_whatever_its_characters_are(range_: str) -> None:
    classes = "".join(f"(?i:[{range_.format(2**15 + n)}])" for n in range(128))
    started = time.thread_time()
    with pytest.raises(GrammarError, match="anchors"):
        check_expression(f"{classes}$")
    used, started = time.thread_time() - started, time.thread_time()
    re.compile(classes)
    assert used < (time.thread_time() - started) / 3


@pytest.mark.parametrize("pattern", [r"[A-\u005a]", r"\\u00", "[a-é世]", r"[\u0041-\U0001f600]"])
def test_other_characters_than_latin_ones(pattern: str) -> None:
    check_expression(pattern)


def accepts(grammar: CompiledGrammar, backend: LlamaBackend, text: str) -> bool:
    """True if a grammar allows a text, and its end after it."""
    matcher = grammar.matcher()
    try:
        for token in backend.vocab.tokenize(text):
            if token not in matcher.mask():
                return False
            matcher.accept(token)
            grammar.pool.start()
        return bool(backend.vocab.end_of_generation.intersection(matcher.mask().ids.tolist()))
    finally:
        matcher.close()


@pytest.mark.system
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "glm-4", "minimax-m3", "gemma-4"])
def test_calls_follow_it_in_every_notation(backend: LlamaBackend, name: str) -> None:
    writer = WRITERS[name]
    tools = taking({"type": "string", "pattern": pattern_of("lark", PATCHES)})
    made = constrain(writer.format, tools, REQUIRED, parallel=False, prompt_tail=tail_of(writer))
    grammar = compiled(backend, made)
    for text, fits in ((PATCH, True), (PATCH[:-1], False), ("a patch", False)):
        written = writer.write_calls([("f", {"a": text})])
        assert accepts(grammar, backend, written) is fits, text
