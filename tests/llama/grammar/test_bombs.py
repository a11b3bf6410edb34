"""Grammars that would take hours, or all of the memory, are refused soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, UnavailableError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar import trial
from trioserve.types import Grammar

pytestmark = pytest.mark.system

#: Seconds of a CPU for each, here and in the trial. Most take less than 1.5, of which the trial's
#: limit is 1.
SECONDS = 3.0


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        assert isinstance(backend, LlamaBackend)
        backend.compile(Grammar("gbnf", 'root ::= "a"'))
        yield backend


def chain(keyword: str, n: int, times: int) -> dict[str, Any]:
    links = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * times} for i in range(n)}
    return {"$defs": {**links, f"d{n}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


MANY_PATTERNS = {"allOf": [string(pattern=f"(a|b)*a(a|b){{{i}}}") for i in range(10, 40)]}

REFUSED: dict[str, Any] = {
    "patterns at once": MANY_PATTERNS,
    "patterns at once, apart": {
        "allOf": [{"properties": {"a": part}, "required": ["a"]} for part in MANY_PATTERNS["allOf"]]
    },
    "multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (99991, 99989, 99971)]},
    "many required": {"type": "object", "required": [f"k{i}" for i in range(20_000)]},
    "parentheses": string(pattern="(" * 5000 + "a" + ")*" * 5000),
    "a wide range": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    "one of many": {"oneOf": [string(pattern=f"a{{{i},}}") for i in range(200)]},
    "properties by pattern": {
        "type": "object",
        "patternProperties": {f"^(a|b)*a(a|b){{{i}}}$": {} for i in range(10, 60)},
    },
    "combinations": {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}_{j}": string()}} for j in range(5)]}
            for i in range(12)
        ]
    },
    "long": {"enum": [f"e{i}" * 3 for i in range(30_000)]},
    "deep": json.loads('{"items":' * 400 + "true" + "}" * 400),
}

BOUNDED: dict[str, Any] = {
    "a long text": string(minLength=10**9),
    "a long pattern": string(pattern="a{1,1000}{1,1000}"),
    "nested repetitions": string(pattern="((((a{1,10}){1,10}){1,10}){1,10}){1,10}"),
    "many states": string(pattern="(a|b)*a(a|b){200}"),
    "letters": string(pattern="[\\p{L}\\p{N}]{1,5000}.{3,4000}\\w{2000}"),
    "many items": {"type": "array", "minItems": 10**9, "maxItems": 2 * 10**9},
    "references": chain("prefixItems", 40, 2),
    "references at once": chain("allOf", 30, 2),
    "references to choose from": chain("anyOf", 30, 2),
    "a long constant": {"const": "x" * 200_000},
    "a long enum": {"enum": [f"e{i}" for i in range(20_000)]},
    "itself": {"$ref": "#"},
}

GBNF = {
    "repeated rules": "root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= [ab]",
    "repetitions": 'root ::= (("a"{1,1000}){1,1000}){1,1000}',
    "doubled rules": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40))
    + 'r40 ::= "a"',
    "digits": f'root ::= "a"{{{"9" * 5000}}}',
    "digits of a token": f"root ::= <[{'9' * 5000}]>",
    "parentheses": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000,
    "long": 'root ::= "' + "a" * 70_000 + '"',
    "choices": "root ::= root root | root? | [ab]*",
    "states": 'root ::= ("a"|"b")* "a" ("a"|"b"){300}',
}


def compiled(backend: LlamaBackend, grammar: Grammar) -> InvalidRequestError | None:
    """Compile within the time; returns the error if it is refused."""
    start = cpu_seconds()
    try:
        backend.compile(grammar)
    except InvalidRequestError as error:
        return error
    finally:
        assert cpu_seconds() - start < SECONDS
    return None


def cpu_seconds() -> float:
    """The time of this process, and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_takes_too_much_is_refused(backend: LlamaBackend, name: str) -> None:
    assert compiled(backend, Grammar("json_schema", json.dumps(REFUSED[name]))) is not None


@pytest.mark.parametrize("name", BOUNDED)
def test_a_schema_that_seems_to_take_much(backend: LlamaBackend, name: str) -> None:
    compiled(backend, Grammar("json_schema", json.dumps(BOUNDED[name])))


@pytest.mark.parametrize("name", GBNF)
def test_a_grammar(backend: LlamaBackend, name: str) -> None:
    compiled(backend, Grammar("gbnf", GBNF[name]))


@pytest.mark.parametrize(
    "pattern",
    ["a{1,1000}{1,1000}", "(" * 200 + "a" + ")*" * 200, "(a|b)*a(a|b){300}", r"(\w+\s?){1,1000}"],
)
def test_a_regular_expression(backend: LlamaBackend, pattern: str) -> None:
    compiled(backend, Grammar("regex", pattern))


def test_the_error_says_why(backend: LlamaBackend) -> None:
    error = compiled(backend, Grammar("json_schema", json.dumps(MANY_PATTERNS), param="x"))
    assert error is not None
    assert error.message == "'x' cannot be used: it takes too much time or memory to compile."
    error = compiled(backend, Grammar("gbnf", GBNF["digits"]))
    assert error is not None
    assert "more than 2000 repetitions" in error.message


def test_numbers_of_many_digits(backend: LlamaBackend) -> None:
    for source in ('{"minLength": ' + "9" * 5000 + "}", '{"a": ' * 10**5):
        error = compiled(backend, Grammar("json_schema", source))
        assert error is not None


def test_what_is_left_of_a_bomb(backend: LlamaBackend) -> None:
    threads = threading.active_count()
    with pytest.raises(InvalidRequestError):
        backend.compile(Grammar("json_schema", json.dumps({"x": 1, **MANY_PATTERNS})))
    assert threading.active_count() == threads
    good = {"type": "object", "properties": {"a": string(pattern="^a+$", maxLength=9)}}
    backend.compile(Grammar("json_schema", json.dumps(good)))


def test_a_bomb_holds_up_no_other_grammar(backend: LlamaBackend) -> None:
    errors = []
    bomb = Grammar("json_schema", json.dumps({"y": 1, **MANY_PATTERNS}))
    thread = threading.Thread(target=lambda: errors.append(compiled(backend, bomb)))
    thread.start()
    for i in range(5):
        backend.compile(Grammar("gbnf", f'root ::= "not yet {i}"'))
        assert thread.is_alive()
    thread.join()
    assert errors != [None]


MEASURE = """
import json, resource, sys
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import InvalidRequestError
from trioserve.types import Grammar
kind, source = json.loads(sys.stdin.read())
with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
    backend.compile(Grammar("gbnf", 'root ::= "a"'))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        backend.compile(Grammar(kind, source))
    except InvalidRequestError:
        pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", json.dumps(MANY_PATTERNS)),
        ("json_schema", json.dumps(BOUNDED["a long enum"])),
        ("gbnf", GBNF["doubled rules"]),
    ],
)
def test_the_memory_of_a_bomb(kind: str, source: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([kind, source]),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert int(done.stdout.splitlines()[-1]) < 200_000  # kB


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"properties": {"a": {"enum": ["x"]}, "b": {"minimum": 1}}}'),
        Grammar("gbnf", 'root ::= "a" | [b-z]*'),
        Grammar("regex", "[ab]+"),
        Grammar("json_object"),
    ],
)
def test_most_grammars_need_no_trial(
    monkeypatch: pytest.MonkeyPatch, backend: LlamaBackend, grammar: Grammar
) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing/here")
    backend.compile(grammar)


def test_no_process_for_a_trial(monkeypatch: pytest.MonkeyPatch, backend: LlamaBackend) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing/here")
    with pytest.raises(UnavailableError, match="no process can be started") as caught:
        backend.compile(Grammar("regex", "a{2}"))
    assert caught.value.retry_after == 5


def test_a_trial_without_the_cpu_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, backend: LlamaBackend
) -> None:
    monkeypatch.setattr(trial, "_WALL_SECONDS", 0.001)  # the process does not start in that time
    with pytest.raises(UnavailableError, match="other work has the CPU"):
        backend.compile(Grammar("regex", "a{3}"))
