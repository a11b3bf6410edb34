"""Compiler: turns the grammars of requests into what llguidance follows.

A grammar is compiled once, by whatever thread asks for it, and remembered. What llguidance cannot
enforce is refused: no output may look as if a grammar held where it did not.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trioserve.errors import EngineError, InvalidRequestError, OutputError
from trioserve.llama.grammar import gbnf, json_schema, tools
from trioserve.llama.grammar.matcher import CompiledGrammar, brief
from trioserve.llama.grammar.pool import MaskPool
from trioserve.llama.grammar.tokens import Tokens
from trioserve.llama.vocab import Vocab
from trioserve.types import Grammar

_T = TypeVar("_T")

#: Bytes of stack for a thread that compiles. llguidance follows references by recursion: a chain of
#: 1,000 overruns 8 MiB. Only what is used is ever allocated.
STACK = 2**28 if sys.maxsize > 2**32 else 2**25
#: Bounds that keep one mask within a few milliseconds, and a grammar within some 50 MB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
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
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._compiling = threading.Lock()  # one grammar at a time
        self._lock = threading.Lock()  # of `_compiled`, held for an instant

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or find it among the last ones.

        Raises:
            InvalidRequestError: it is wrong, too large, or cannot be enforced.
            ServerClosingError: the model is closed.
        """
        if (known := self._find(grammar)) is not None:
            return known
        with self._compiling, self._vocab.in_use():
            if (known := self._find(grammar)) is not None:
                return known
            return _with_stack(lambda: self._compile(grammar))

    def forget(self, compiled: CompiledGrammar) -> None:
        """Compile the grammar anew when it is needed again."""
        with self._lock:
            if self._compiled.get(compiled.grammar) is compiled:
                del self._compiled[compiled.grammar]

    def close(self) -> None:
        """Wait for masks that are being made, and free everything. Closing twice is fine."""
        self.pool.close()
        with self._lock:
            self._compiled.clear()
        self._tokens.close()

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
            return known

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if not self._tokens.ends:
            raise _invalid(grammar, "the model has no token that ends an output")
        try:
            matcher = self._matcher(grammar, self._tokens.tokenizer)
            compiled = CompiledGrammar(grammar, matcher, self._tokens, self.pool, self.forget)
        except tools.ToolSchemaError as error:
            raise _invalid(attrs.evolve(grammar, param=error.param), str(error)) from error
        except (gbnf.GbnfError, json_schema.SchemaError, _RefusedError) as error:
            raise _invalid(grammar, str(error)) from error
        except EngineError as error:
            raise _invalid(grammar, error.message.rstrip(".")) from error
        if grammar.thinking is not None:
            self._tokens.names  # noqa: B018 (made now, not on the inference thread)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _matcher(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        """Compile by the kind of a grammar."""
        source = grammar.source
        match grammar.kind:
            case "json_schema":
                return _from_schema(json_schema.read(source), tokenizer)
            case "json_object":
                return _from_schema({"type": "object"}, tokenizer)
            case "tools":
                return self._from_tools(source, tokenizer)
        if (size := len(source)) > _MAX_SOURCE:
            raise _RefusedError(f"it has {size} characters, more than {_MAX_SOURCE}")
        if grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(source)
        else:
            text = LLMatcher.grammar_from_lark(gbnf.to_lark(source, self._tokens.in_lark))
        matcher = _new_matcher(text, tokenizer)
        if matcher.is_error():
            raise _RefusedError(brief(matcher.get_error()))
        return matcher

    def _from_tools(self, source: str, tokenizer: LLTokenizer) -> LLMatcher:
        lark = tools.to_lark(source, self._tokens.control, self._tokens.ends, _JSON_OPTIONS)
        matcher = _new_matcher(LLMatcher.grammar_from_lark(lark), tokenizer)
        if matcher.is_error():
            tools.blame(source, lambda schema: _from_schema(schema, tokenizer))
            raise _RefusedError(brief(matcher.get_error()))
        return matcher


class _RefusedError(Exception):
    """llguidance cannot use the grammar. The message is a part of a sentence."""


def _new_matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _from_schema(schema: Any, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a schema that has been checked.

    Raises:
        SchemaError: llguidance refuses it; the message names the place.
    """

    def attempt(part: Any) -> LLMatcher:
        text = LLMatcher.grammar_from_json_schema(json.dumps(part), overrides=_JSON_OPTIONS)
        return _new_matcher(text, tokenizer)

    try:
        matcher = attempt(schema)
    except ValueError as error:  # numbers that JSON does not have
        raise json_schema.SchemaError(brief(str(error))) from error
    if problem := matcher.get_error():
        path = json_schema.locate(schema, problem, lambda part: attempt(part).get_error())
        raise json_schema.SchemaError(brief(problem), path)
    return matcher


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
