"""Grammars: which tokens may come next, by llguidance.

A grammar is compiled once, by whatever thread asks for it. Each task has a `Matcher` that follows
its output. When a token was chosen, a thread of a small pool works out which tokens may follow it
while `llama_decode` runs, so that the inference thread finds the answer ready.

All of it fails closed: what llguidance cannot enforce is refused, and a matcher that gives up ends
its task.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import attrs
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from trioserve.errors import EngineError, InvalidRequestError
from trioserve.llama.grammar import gbnf, json_schema, tool_lark
from trioserve.llama.grammar.mask import Mask, all_but
from trioserve.llama.grammar.matcher import CompiledGrammar, Matcher, advance_all, brief
from trioserve.llama.grammar.name_index import NameIndex
from trioserve.llama.grammar.tokenizer import make_tokenizer
from trioserve.llama.vocab import Vocab
from trioserve.types import Grammar, TokenId

_T = TypeVar("_T")

#: Bytes of stack for a thread that compiles. llguidance follows references by recursion: 1,000 in
#: a chain overrun 8 MiB. Only what is used is ever allocated.
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
#: llama-server's space in JSON: a model that writes nothing but blanks comes to an end.
_JSON_OPTIONS: Any = {"lenient": False, "whitespace_pattern": r"[ ]|\n{1,2}[ \t]{0,20}"}
_SOURCE_MAX = 2**16  # characters of GBNF, or of a regular expression
_CACHED_MAX = 64


class Compiler:
    """Compiles grammars for one vocabulary, and remembers the last ones.

    `compile` and `forget` may be called from any thread; `close` when no task uses a matcher.

    Args:
        vocab: of the model. What llguidance needs of it is made with the first grammar: that
            takes a third of a second for 150,000 tokens.
        n_threads: how many masks can be made at the same time.
    """

    def __init__(self, vocab: Vocab, *, n_threads: int = 1) -> None:
        self.n_vocab = vocab.n_tokens
        self.ends = vocab.end_of_generation
        self.end_ids = np.array(sorted(self.ends), dtype=np.int32)
        #: Matchers whose next mask is to be made, of the inference thread.
        self.due: list[tuple[Matcher, TokenId, Future[Mask]]] = []
        self._n_threads = max(1, n_threads)
        self._pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="trioserve-grammar")
        self._vocab = vocab
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._one = threading.Lock()  # held while one grammar is compiled
        self._lock = threading.Lock()  # held for an instant

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or find it among the last ones.

        Raises:
            InvalidRequestError: it is wrong, too large, or cannot be enforced.
            ServerClosingError: the model is closed.
        """
        if (known := self._find(grammar)) is not None:
            return known
        with self._one, self._vocab.in_use():
            if (known := self._find(grammar)) is not None:
                return known
            return _with_stack(lambda: self._compile(grammar))

    @cached_property
    def names(self) -> NameIndex:
        """Tokens by their names."""
        return NameIndex(self._vocab.names)

    def newlines(self, most: int) -> NDArray[np.int32]:
        """Return the tokens that are nothing but newlines, and not more than `most`."""
        ids = [token for n in range(1, most + 1) for token in self.names.find(b"\n" * n)]
        return np.array(ids, dtype=np.int32)

    @cached_property
    def no_end(self) -> Mask:
        """Anything but the end of the output."""
        return all_but(self.end_ids, self.n_vocab)

    @cached_property
    def control(self) -> dict[str, TokenId]:
        """Control tokens by their names, which are no text of theirs."""
        pairs = enumerate(zip(self._vocab.pieces, self._vocab.names, strict=True))
        return {
            name.decode(errors="replace"): token
            for token, (piece, name) in pairs
            if name and piece != name
        }

    def name_of(self, token: TokenId) -> bytes:
        """The text of a token, or the name of a control token."""
        return self._vocab.names[token]

    def split(self, text: bytes) -> list[TokenId]:
        """Turn text into tokens, as a matcher takes them."""
        assert self._tokenizer is not None
        return self._tokenizer.tokenize_bytes(text)

    def start(self) -> None:
        """Have the masks made that are due.

        To be called just before a decode: that leaves the GIL to the threads of the pool, while
        sampling would have to share it with them.
        """
        if self.due:
            due, self.due = self.due, []
            for i in range(min(self._n_threads, len(due))):
                self._pool.submit(advance_all, due[i :: self._n_threads])

    def forget(self, compiled: CompiledGrammar) -> None:
        """Compile the grammar anew when it is needed again."""
        with self._lock:
            if self._compiled.get(compiled.grammar) is compiled:
                del self._compiled[compiled.grammar]

    def close(self) -> None:
        """Wait for masks that are being made, and free everything. Closing twice is fine."""
        self.due.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._compiled.clear()
        self._tokenizer = None

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
            return known

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if not self.ends:
            raise _invalid(grammar, "the model has no token that ends an output")
        if self._tokenizer is None:
            self._tokenizer = make_tokenizer(self._vocab)
        try:
            if grammar.kind == "json_schema":
                matcher = _from_schema(json_schema.read(grammar.source), self._tokenizer)
            elif grammar.kind == "tools":
                matcher = self._from_tools(grammar, self._tokenizer)
            else:
                matcher = self._from_text(grammar, self._tokenizer)
            compiled = CompiledGrammar(grammar, self, matcher)
        except tool_lark.PartError as error:
            raise _invalid(attrs.evolve(grammar, param=error.param), str(error)) from error
        except (gbnf.GbnfError, json_schema.SchemaError, _RefusedError) as error:
            raise _invalid(grammar, str(error)) from error
        except EngineError as error:
            raise _invalid(grammar, error.message.rstrip(".")) from error
        if grammar.thinking is not None:
            self.names  # noqa: B018 (made now, not on the inference thread)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _CACHED_MAX:
                self._compiled.popitem(last=False)
        return compiled

    def _from_tools(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        lark = tool_lark.to_lark(grammar.source, self.control, self.ends, _JSON_OPTIONS)
        matcher = _matcher(LLMatcher.grammar_from_lark(lark), tokenizer)
        if matcher.is_error():
            tool_lark.blame(grammar.source, lambda schema: _from_schema(schema, tokenizer))
            raise _RefusedError(brief(matcher.get_error()))
        return matcher

    def _from_text(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        if grammar.kind == "json_object":
            return _from_schema({"type": "object"}, tokenizer)
        if (size := len(grammar.source)) > _SOURCE_MAX:
            raise _RefusedError(f"it has {size} characters, more than {_SOURCE_MAX}")
        if grammar.kind == "regex":
            text = LLMatcher.grammar_from_regex(grammar.source)
        else:
            text = LLMatcher.grammar_from_lark(gbnf.to_lark(grammar.source, self._name_token))
        matcher = _matcher(text, tokenizer)
        if matcher.is_error():
            raise _RefusedError(brief(matcher.get_error()))
        return matcher

    def _name_token(self, token: str | int, negated: bool) -> str | None:
        """Write a token in Lark; see `gbnf.TokenNames`."""
        if isinstance(token, str):
            ids = self._vocab.tokenize(token)
            if len(ids) != 1:
                return None
            token = ids[0]
        if not 0 <= token < self.n_vocab:
            return None
        if not negated:
            return f"<[{token}]>"
        others = sorted(self.ends | {token})  # the output does not end in the middle
        return f"<[^{','.join(map(str, others))}]>"


class _RefusedError(Exception):
    """llguidance cannot use the grammar. The message is a part of a sentence."""


def _matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _from_schema(schema: Any, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a schema that was checked.

    Raises:
        SchemaError: llguidance refuses it; the message names the place.
    """

    def attempt(part: Any) -> LLMatcher:
        text = LLMatcher.grammar_from_json_schema(json.dumps(part), overrides=_JSON_OPTIONS)
        return _matcher(text, tokenizer)

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
        except BaseException as error:  # a panic in Rust is not an Exception
            is_panic = not isinstance(error, Exception)
            failures.append(
                EngineError(f"llguidance failed: {error!r:.200}") if is_panic else error
            )

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
