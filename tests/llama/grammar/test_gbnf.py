"""Grammars in GBNF: what they allow, and which are refused."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.grammar_bench import (
    GREEDY,
    generate,
    refusal,
)
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar import gbnf
from trioserve.types import FinishReason, Grammar, SamplingParams

GBNFS = {
    'root ::= "yes" | "no"': "yes|no",
    'root ::= [a-z]* "end"': "[a-z]*end",  # the class could take the end as well
    'root ::= (head "-" tail)\n# a comment\nhead ::= [A-F0-9]{2,4}\ntail ::= head |\n "x" # or\n': (
        "[A-F0-9]{2,4}-([A-F0-9]{2,4}|x)"
    ),
    r'root ::= "\"\\\n\t\x41\u00e9\U0001F600"': '"\\\\\n\tAé😀',
    r"root ::= [\x41\u0042-\U00000044/&&^~\]-]{5}": r"[A-D/&^~\-\]]{5}",
    r"root ::= [^a-z\n]{3}": r"[^a-z\n]{3}",
    r'root ::= [+\-0-9]{1,3} "\-"': r"[+\-0-9]{1,3}-",
    "root ::= .{4}": r"(?s:.{4})",
    'root ::= foo-Bar?\nfoo-Bar ::= "a"{0,3} start\nstart ::= "b"\n': "(a{0,3}b)?",
    'root ::= ("a" | "b" ("c" |\n\n "d"))+ "."': r"(a|b[cd])+\.",
}


@pytest.mark.system
@pytest.mark.parametrize("source", GBNFS)
def test_gbnf(backend: LlamaBackend, source: str) -> None:
    for sampling in (GREEDY, SamplingParams(temperature=2.0, seed=1, top_k=0)):
        text, reason = generate(backend, Grammar("gbnf", source), sampling=sampling)
        assert reason is FinishReason.LIMIT or re.fullmatch(GBNFS[source], text), text


def allows(backend: LlamaBackend, grammar: Grammar, text: str) -> bool:
    """Return True if a grammar allows an output, token by token."""
    matcher = backend.compile(grammar).matcher()
    try:
        for token in backend.vocab.tokenize(text, parse_special=False):
            if token not in matcher.mask():
                return False
            matcher.accept(token)
        return bool(backend.vocab.end_of_generation & set(matcher.mask().ids.tolist()))
    finally:
        matcher.close()


def test_recursive_gbnf(backend: LlamaBackend) -> None:
    grammar = Grammar(
        "gbnf",
        r"""
        root ::= value
        value ::= "[" ws (value ("," ws value)*)? "]" ws | string ws
        string ::= "\"" [^"\\]* "\""
        ws ::= [ \t\n]*
        """.replace("\n        ", "\n"),
    )
    assert allows(backend, grammar, '["a", ["b" , []], "c"]')
    assert not allows(backend, grammar, '["a", ["b" , []], "c"')
    assert not allows(backend, grammar, '["a" "b"]')
    assert not allows(backend, grammar, "")
    parts = Grammar("gbnf", 'root ::= "(" root ")" | [a-z]* "end" [a-z]*')
    assert allows(backend, parts, "((friendly))")
    assert not allows(backend, parts, "((fiendly)")


OBJECT = """
object ::= "{" (pair ("," pair)*)? "}"
pair ::= [a-z]+ ":" (object | [0-9]+)
"""
NESTED = "{a:{b:1},c:{}}"


@pytest.mark.parametrize(
    ("root", "texts", "others"),
    [
        ('.* "=" object', [f"x={NESTED}", "={}", f"a=b={NESTED}"], ["x=", "x={} y", "x"]),
        ('text object\ntext ::= .* "="', [f"x={NESTED}"], [NESTED]),
        (".* object", [f"so: {NESTED}", "{}"], ["so", "so {} x"]),
        ('.* ("=>" | ":=") object', [f"x =>{NESTED}", f"a = b :={NESTED}"], [f"x = {NESTED}"]),
        ('([^\\n]+ "=" object "\\n")+', [f"x={NESTED}\ny={{}}\n"], ["x={}"]),
        ('thought "</think>" object\nthought ::= .*', [f"a < b </think>{NESTED}"], [NESTED]),
        ('.* "a" .* "b" object', [f"a, b{NESTED}"], [f"b a{NESTED}"]),
        ('[ a-z]+ "is" [a-z] object', [f"this isx{NESTED}"], [f"that{NESTED}"]),
        ('[ \\n]* "=" list\nlist ::= [ \\n]* "[" list* "]" [ \\n]*', ["  = [[] [ []]] "], ["="]),
    ],
)
@pytest.mark.usefixtures("no_trials")
def test_free_text_ends_at_the_marker(
    backend: LlamaBackend, root: str, texts: list[str], others: list[str]
) -> None:
    grammar = Grammar("gbnf", f"root ::= {root}{OBJECT}")
    for text in texts:
        assert allows(backend, grammar, text), text
    for text in others:
        assert not allows(backend, grammar, text), text


@pytest.mark.usefixtures("no_trials")
def test_rules_that_double_take_bounded_time(backend: LlamaBackend) -> None:
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60))
    start = time.process_time()
    gbnf.to_lark(f'root ::= .* r0 root | "."\n{rules}r60 ::= "a"\n', lambda token, negated: None)
    assert time.process_time() - start < 1


def test_gbnf_may_name_tokens(backend: LlamaBackend) -> None:
    end, start = backend.vocab.tokenize("<|im_end|><|im_start|>")
    grammar = Grammar("gbnf", 'root ::= <|im_start|> "a" !<|im_start|>')
    matcher = backend.compile(grammar).matcher()
    assert matcher.mask().only == start
    matcher.accept(start)
    (a,) = backend.vocab.tokenize("a")
    assert matcher.mask().only == a
    matcher.accept(a)
    assert start not in matcher.mask() and end not in matcher.mask() and a in matcher.mask()
    same = backend.compile(Grammar("gbnf", f'root ::= <[{start}]> "a" !<[{start}]>'))
    assert same.first.only == start


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "there is no rule 'root'"),
        ("root", "'::=' is missing (line 1)"),
        ('root ::= "a', "'\"' is missing"),
        ("root ::= [a", "']' is missing"),
        ("root ::= []", "the character class is empty"),
        ("root ::= [z-a]", "the range from 'z' to 'a' is empty"),
        ('root ::= ("a"', "')' is missing"),
        ('root ::= "a")', "')' is unexpected here"),
        ("root ::= other", "there is no rule 'other' (line 1)"),
        ('root ::= a\na ::= "x"\na ::= "y"', "there are two rules 'a'"),
        (r'root ::= "\q"', "an escape sequence"),
        (r'root ::= "\ud800"', "U+D800 is not a character"),
        ('root ::= "a"{3,2}', "the minimum 3 of a repetition is above its maximum 2"),
        ('root ::= "a"{99999}', "more than 2000 repetitions"),
        (f'root ::= "a"{{1{" " * 60_000}', "not a repetition"),
        ("root ::= <[99999]>", "there is no token 99999"),
        ("root ::= <no such thing>", "there is no token <no such thing>"),
        ("root ::= " + "(" * 40 + '"a"' + ")" * 40, "more than 32 levels of parentheses"),
        ("root ::= " + '"a" ' * 20000, "more than 65536"),
        ("".join(f'r{i} ::= "a"\n' for i in range(2001)), "more than 2000 rules"),
        ("%llguidance {}\nstart: /.*/", "is not the name of a rule"),
    ],
)
def test_broken_gbnf(backend: LlamaBackend, source: str, problem: str) -> None:
    assert problem in refusal(backend, Grammar("gbnf", source))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='rot:=ab"[]()|*+?{}1,<>!\\^-.\n #é'))
def test_any_text_is_gbnf_or_refused(text: str) -> None:
    try:
        lark = gbnf.to_lark("root ::= " + text, lambda token, negated: None)
    except gbnf.GbnfError as error:
        said = str(error)
    else:
        said = f"{lark}(line 0)"
        assert lark.startswith("start: ")
    assert "(line " in said
