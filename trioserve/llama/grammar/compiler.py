"""Compiler: turns the grammars of requests into what llguidance follows.

A grammar is compiled once, by whatever thread asks for it, and remembered. What llguidance cannot
enforce is refused: no output may look as if a grammar held where it did not. So is what takes too
much: a GBNF or a regular expression of more than 65,536 characters, a schema beyond the bounds of
`json_schema`, and what fails its `trial`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

import attrs
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trioserve.errors import EngineError, InvalidRequestError, OutputError
from trioserve.llama.grammar import gbnf, json_schema, tools, trial
from trioserve.llama.grammar.matcher import CompiledGrammar, brief
from trioserve.llama.grammar.pool import MaskPool
from trioserve.llama.grammar.tokens import Tokens
from trioserve.llama.vocab import Vocab
from trioserve.types import Grammar

_T = TypeVar("_T")
_Key: TypeAlias = tuple[str, Grammar]  # whose it is, and what

#: Bytes of stack for a thread that compiles. llguidance follows references by recursion: a chain of
#: 1,000 overruns 8 MiB. Only what is used is ever allocated.
STACK = 2**28 if sys.maxsize > 2**32 else 2**25
#: Bounds that keep one mask within a few milliseconds, and a grammar within some 50 MB.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,  # four for each of as many properties as a schema may have
    "initial_lexer_fuel": 250_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
#: llama-server's whitespace in JSON: a model that writes nothing but blanks comes to an end.
_JSON_OPTIONS: Any = {"lenient": False, "whitespace_pattern": r"[ ]|\n{1,2}[ \t]{0,20}"}
_MAX_SOURCE = 2**16  # characters of GBNF, or of a regular expression
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 2**27


class Compiler:
    """Compiles grammars for one vocabulary, and remembers the last ones.

    `compile` and `forget` may be called from any thread; `close` when no task uses a matcher.

    Args:
        vocab: of the model. llguidance's form of it is made with the first grammar, which takes a
            third of a second for 150,000 tokens.
        n_threads: how many masks can be made at the same time.
    """

    def __init__(self, vocab: Vocab, *, n_threads: int = 1) -> None:
        self.pool = MaskPool(n_threads)
        self._tokens = Tokens(vocab)
        self._vocab = vocab
        self._compiled: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._n_bytes = 0  # that they take, roughly
        self._compiling = threading.Lock()  # one grammar at a time
        self._lock = threading.Lock()  # of `_compiled`, held for an instant

    def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Compile a grammar, or find it among the last ones of its owner.

        It would be quicker to find those of others, and tell what they have sent.

        Raises:
            InvalidRequestError: it is wrong, too large, or cannot be enforced.
            ServerClosingError: the model is closed.
        """
        key = owner, grammar
        if (known := self._find(key)) is not None:
            return known
        with self._vocab.in_use():
            return _with_stack(lambda: self._compile(key))

    def forget(self, owner: str, compiled: CompiledGrammar) -> None:
        """Compile the grammar anew when it is needed again."""
        key = owner, compiled.grammar
        with self._lock:
            if self._compiled.get(key) is compiled:
                del self._compiled[key]
                self._n_bytes -= _size_of(compiled.grammar)

    def close(self) -> None:
        """Wait for masks that are being made, and free everything. Closing twice is fine."""
        self.pool.close()
        with self._lock:
            self._compiled.clear()
            self._n_bytes = 0
        self._tokens.close()

    def _find(self, key: _Key) -> CompiledGrammar | None:
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
            return known

    def _compile(self, key: _Key) -> CompiledGrammar:
        _, grammar = key
        if not self._tokens.ends:
            raise _invalid(grammar, "the model has no token that ends an output")
        try:
            text = self._text(grammar)
            if trial.is_needed(grammar.kind, text):
                trial.run(text, _LIMITS)
            with self._compiling:
                return self._find(key) or self._compile_text(key, text)
        except tools.ToolSchemaError as error:
            raise _invalid(attrs.evolve(grammar, param=error.param), str(error)) from error
        except (gbnf.GbnfError, json_schema.SchemaError, trial.TrialError, _RefusedError) as error:
            raise _invalid(grammar, str(error)) from error
        except EngineError as error:
            problem = error.message.removeprefix("The grammar cannot be followed: ")
            raise _invalid(grammar, problem.rstrip(".")) from error

    def _text(self, grammar: Grammar) -> str:
        """Write a grammar of any kind as llguidance reads it."""
        source = grammar.source
        match grammar.kind:
            case "json_schema":
                return _schema_text(json_schema.read(source))
            case "json_object":
                return _schema_text({"type": "object"})
            case "tools":
                control, ends = self._tokens.control, self._tokens.ends
                return _lark_text(tools.to_lark(source, control, ends, _JSON_OPTIONS))
        if (size := len(source)) > _MAX_SOURCE:
            raise _RefusedError(f"it has {size} characters, more than {_MAX_SOURCE}")
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(source))
        return _lark_text(gbnf.to_lark(source, self._tokens.in_lark))

    def _compile_text(self, key: _Key, text: str) -> CompiledGrammar:
        owner, grammar = key
        tokenizer = self._tokens.tokenizer
        matcher = _new_matcher(text, tokenizer)
        if matcher.is_error():
            _explain(grammar, matcher.get_error(), tokenizer)
        compiled = CompiledGrammar(
            grammar, matcher, self._tokens, self.pool, partial(self.forget, owner)
        )
        if grammar.thinking is not None:
            self._tokens.names  # noqa: B018 (made now, not on the inference thread)
        with self._lock:
            self._compiled[key] = compiled
            self._n_bytes += _size_of(grammar)
            while self._n_bytes > _MAX_CACHED_BYTES or len(self._compiled) > _MAX_CACHED:
                (_, oldest), _ = self._compiled.popitem(last=False)
                self._n_bytes -= _size_of(oldest)
        return compiled


def _size_of(grammar: Grammar) -> int:
    """Estimate what a compiled grammar takes: 0.2 to 5 MB were measured."""
    return 2 * 10**5 + 50 * len(grammar.source)


class _RefusedError(Exception):
    """llguidance cannot use the grammar. The message is a part of a sentence."""


def _new_matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _schema_text(schema: Any) -> str:
    """Write a checked schema as llguidance reads it. Raises SchemaError."""
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))
    except ValueError as error:  # numbers that JSON does not have
        raise json_schema.SchemaError(brief(str(error))) from error


def _lark_text(lark: str) -> str:
    return str(LLMatcher.grammar_from_lark(lark))


def _explain(grammar: Grammar, problem: str, tokenizer: LLTokenizer) -> NoReturn:
    """Raise for a grammar that llguidance refuses; the message names the place if it is a schema.

    Raises:
        SchemaError: the schema cannot be used.
        ToolSchemaError: the schema of a tool cannot be used.
        _RefusedError: the grammar of another kind cannot be used.
    """

    def ask(schema: Any) -> str:
        return str(_new_matcher(_schema_text(schema), tokenizer).get_error())

    def attempt(schema: Any) -> None:
        if problem := ask(schema):
            raise json_schema.SchemaError(brief(problem), json_schema.locate(schema, problem, ask))

    if grammar.kind == "tools":
        tools.blame(grammar.source, attempt)
    elif grammar.kind == "json_schema":
        attempt(json_schema.read(grammar.source))
    raise _RefusedError(brief(problem))


def _invalid(grammar: Grammar, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{grammar.param}' cannot be used: {problem}.", param=grammar.param)


def _with_stack(function: Callable[[], _T]) -> _T:
    """Call a function in a thread with a large stack, and return or raise what it does."""
    results: list[_T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            failures.append(error)
        except BaseException as error:  # a panic in Rust
            failures.append(OutputError("The grammar cannot be compiled."))
            failures[0].__cause__ = error

    thread = threading.Thread(target=work, name="trioserve-compile", daemon=True)
    size = threading.stack_size(STACK)
    try:
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
