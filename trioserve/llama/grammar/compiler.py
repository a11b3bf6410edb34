"""Compiler: compiles the grammars of requests for llguidance.

A grammar is compiled once, by whatever thread asks for it, and remembered. What llguidance cannot
enforce is refused: no output may look as if a grammar held where it did not. So is what takes too
much: a grammar or a regular expression of more than 65,536 characters, a schema beyond the
bounds below, and what fails its `trial`.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from functools import partial
from typing import Any, TypeAlias

import attrs
from llguidance import LLMatcher, LLParserLimits

from trioserve.errors import EngineError, InvalidRequestError, UnavailableError
from trioserve.llama.grammar import gbnf, lark, trial
from trioserve.llama.grammar.json_schema import UnusableError, brief, locate, read_schema
from trioserve.llama.grammar.matcher import CompiledGrammar, MaskPool
from trioserve.llama.grammar.stack import with_stack
from trioserve.llama.grammar.tokens import GrammarVocab
from trioserve.llama.grammar.tools import ToolGrammar, as_lark
from trioserve.llama.vocab import LlamaVocab
from trioserve.types import Grammar

_Key: TypeAlias = tuple[str, Grammar]  # whose it is, and what

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
_MAX_SOURCE = 2**16  # characters of GBNF, of Lark, or of a regular expression
_MAX_CACHED = 64
_RETRY_AFTER = 5.0  # seconds
_MAX_CACHED_BYTES = 2**27


class Compiler:
    """Compiles grammars for one vocabulary, and remembers the last ones.

    `compile` and `forget` may be called from any thread; `close` when no task uses a matcher.

    Args:
        vocab: of the model. llguidance's form of it is made with the first grammar, which takes a
            third of a second for 150,000 tokens.
        n_threads: how many masks can be made at the same time.
    """

    def __init__(self, vocab: LlamaVocab, *, n_threads: int = 1) -> None:
        self.pool = MaskPool(n_threads)
        self._tokens = GrammarVocab(vocab)
        self._vocab = vocab
        self._compiled: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._n_bytes = 0  # that they take, roughly
        self._compiling = threading.Lock()  # one grammar at a time
        self._lock = threading.Lock()  # of `_compiled`, held for an instant

    def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Compile a grammar, or find it among the last ones of its owner.

        Finding those of others would be quicker, and reveal what they have sent.

        Raises:
            InvalidRequestError: it is wrong, too large, or cannot be enforced.
            UnavailableError: it cannot be tried now; has a time to retry after.
            ServerClosingError: the model is closed.
        """
        key = owner, grammar
        if (known := self._find(key)) is not None:
            return known
        with self._vocab.in_use():
            return with_stack(lambda: self._compile(key))

    def forget(self, owner: str, compiled: CompiledGrammar) -> None:
        """Compile the grammar again when it is needed."""
        key = owner, compiled.grammar
        with self._lock:
            if self._compiled.get(key) is compiled:
                del self._compiled[key]
                self._n_bytes -= compiled.n_bytes

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
        owner, grammar = key
        if not self._tokens.ends:
            raise _invalid(grammar, "the model has no token that ends an output")
        try:
            compiled = self._made(grammar, owner)
        except UnusableError as error:
            param = error.param or grammar.param
            raise _invalid(attrs.evolve(grammar, param=param), str(error)) from error
        except (gbnf.GbnfError, trial.TrialError) as error:
            raise _invalid(grammar, str(error)) from error
        except trial.TrialDelayedError as error:
            raise UnavailableError(
                f"'{grammar.param}' cannot be compiled now: {error}.",
                param=grammar.param,
                retry_after=_RETRY_AFTER,
            ) from error
        except EngineError as error:
            problem = error.message.removeprefix("The grammar cannot be followed: ")
            raise _invalid(grammar, problem.rstrip(".")) from error
        if grammar.thinking is not None:
            self._tokens.names  # noqa: B018 (made now, not on the inference thread)
        return self._kept(key, compiled)

    def _made(self, grammar: Grammar, owner: str) -> CompiledGrammar:
        tools: ToolGrammar | None = None
        if grammar.kind == "tools":
            tools = self._tools(grammar.source)
            matcher = tools.start()
        else:
            text = self._text(grammar)
            if trial.is_needed(grammar.kind, text):
                trial.run(text, _LIMITS)
            matcher = self._matcher_of(grammar, text)
        growing = tools if tools is not None and tools.grows else None
        forget = partial(self.forget, owner)
        return CompiledGrammar(grammar, matcher, self._tokens, self.pool, forget, growing)

    def _matcher_of(self, grammar: Grammar, text: str) -> LLMatcher:
        with self._compiling:
            try:
                return self._matcher(text)
            except UnusableError:
                if grammar.kind == "json_schema":
                    self._explain(read_schema(grammar.source))
                raise

    def _tools(self, source: str) -> ToolGrammar:
        return ToolGrammar(
            source,
            self._tokens.control,
            self._tokens.ends,
            options=_JSON_OPTIONS,
            limits=_LIMITS,
            compile=self._matcher,
            explain=self._explain,
        )

    def _text(self, grammar: Grammar) -> str:
        """Write a grammar of any kind but "tools" as llguidance reads it."""
        source = grammar.source
        match grammar.kind:
            case "json_schema":
                return _schema_text(read_schema(source))
            case "json_object":
                return _schema_text({"type": "object"})
            case "structural":
                parts, tokens = json.loads(source), self._tokens
                written = as_lark(parts, tokens.control, tokens.ends, _JSON_OPTIONS)
                return str(LLMatcher.grammar_from_lark(written))
        if (size := len(source)) > _MAX_SOURCE:
            raise UnusableError(f"it has {size} characters, more than {_MAX_SOURCE}")
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(_without_anchors(source)))
        if grammar.kind == "lark":
            written = lark.to_llguidance(source, self._tokens.in_lark, _JSON_OPTIONS)
        else:
            written = gbnf.to_lark(source, self._tokens.in_lark)
        return str(LLMatcher.grammar_from_lark(written))

    def _matcher(self, text: str) -> LLMatcher:
        """Compile a grammar in llguidance's form. Raises UnusableError."""
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(self._tokens.tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise UnusableError(brief(matcher.get_error()))
        return matcher

    def _explain(self, schema: Any) -> None:
        """Compile a schema. Raises UnusableError, whose message names the place of the problem."""

        def ask(part: Any) -> str:
            try:
                self._matcher(_schema_text(part))
            except UnusableError as error:
                return str(error)
            return ""

        if problem := ask(schema):
            path, problem = locate(schema, problem, ask)
            raise UnusableError(problem, path)

    def _kept(self, key: _Key, compiled: CompiledGrammar) -> CompiledGrammar:
        """Keep a grammar, unless another thread has compiled it meanwhile; returns which."""
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                return known
            self._compiled[key] = compiled
            self._n_bytes += compiled.n_bytes
            while self._n_bytes > _MAX_CACHED_BYTES or len(self._compiled) > _MAX_CACHED:
                _, oldest = self._compiled.popitem(last=False)
                self._n_bytes -= oldest.n_bytes
            return compiled


def _without_anchors(pattern: str) -> str:
    """Leave out what an expression of the whole output need not say."""
    body = pattern.removesuffix("$")
    is_escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return (pattern if is_escaped else body).removeprefix("^")


def _schema_text(schema: Any) -> str:
    """Write a checked schema as llguidance reads it. Raises UnusableError."""
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))
    except ValueError as error:  # numbers that JSON does not have
        raise UnusableError(brief(str(error))) from error


def _invalid(grammar: Grammar, problem: str) -> InvalidRequestError:
    return InvalidRequestError.at(grammar.param, f"cannot be used: {problem}.")
