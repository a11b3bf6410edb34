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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from trioserve.errors import EngineError, InvalidRequestError, TrioServeError
from trioserve.llama import gbnf, json_schema
from trioserve.llama.mask import Mask
from trioserve.llama.vocab import Vocab
from trioserve.types import Constraint, Grammar, TokenId

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
#: Seconds that the inference thread waits for a mask; it should take a thousandth of that.
_WAIT_SECONDS = 5.0


def _advance(due: list[tuple[Matcher, TokenId, Future[Mask]]]) -> None:
    """Make masks, in a thread of the pool."""
    for matcher, token, pending in due:
        if not pending.set_running_or_notify_cancel():
            continue  # its task is gone
        try:
            pending.set_result(matcher.advance(token))
        except TrioServeError as error:
            pending.set_exception(error)


class CompiledGrammar(Constraint):
    """A grammar in llguidance's form, and the tokens that an output may begin with."""

    __slots__ = ("_compiler", "_matcher", "first")

    def __init__(self, grammar: Grammar, compiler: Compiler, matcher: LLMatcher) -> None:
        super().__init__(grammar)
        self._compiler = compiler
        self._matcher = matcher
        self.first = _next_mask(matcher, compiler.n_vocab)

    def matcher(self, banned: Sequence[TokenId] = ()) -> Matcher:
        """Make what follows one output.

        Args:
            banned: tokens that the request forbids.

        Raises:
            InvalidRequestError: the grammar begins with nothing but those.
        """
        return Matcher(self, self._matcher.deep_copy(), self._compiler, banned)


class Matcher:
    """Follows one output through a grammar.

    To be used by the inference thread; the next mask is made by another.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        matcher: LLMatcher,
        compiler: Compiler,
        banned: Sequence[TokenId],
    ) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._compiler = compiler
        self._banned = np.array(sorted(set(banned)), dtype=np.int32)
        self._mask: Mask | None = self._allowed(compiled.first)
        self._pending: Future[Mask] | None = None
        self._over = False

    def mask(self) -> Mask:
        """Return which tokens may come next; waits until that is known.

        Raises:
            EngineError: llguidance gave up, or takes too long.
            InvalidRequestError: the request forbids every token that the grammar allows.
        """
        if self._mask is None:
            if self._pending is None:
                raise EngineError("The output has ended, or its grammar is closed.")
            if any(matcher is self for matcher, _, _ in self._compiler.due):
                self._compiler.start()  # nothing was decoded since
            try:
                self._mask = self._pending.result(_WAIT_SECONDS)
            except TimeoutError:
                raise EngineError("The grammar takes too long to follow.") from None
            except EngineError:
                # Other tasks share some of its state, which may have come to a limit.
                self._compiler.forget(self._compiled)
                raise
            self._pending = None
        return self._mask

    def accept(self, token: TokenId) -> None:
        """Go on with a token that the mask allows; `Compiler.start` has the next mask made.

        Raises:
            EngineError: the mask does not allow it.
        """
        if self._mask is None or token not in self._mask:
            raise EngineError(f"The grammar does not allow token {token}, which was chosen.")
        self._mask = None
        if token not in self._compiler.ends:
            self._pending = Future()
            self._compiler.due.append((self, token, self._pending))

    def close(self) -> None:
        """Drop it. A mask that is being made is finished by its thread, and dropped then."""
        if self._pending is not None:
            self._pending.cancel()
        self._mask = self._pending = None

    def advance(self, token: TokenId) -> Mask:
        """Make the next mask. Nobody else uses the matcher meanwhile.

        Raises:
            EngineError: llguidance gave up.
            InvalidRequestError: the request forbids every token that the grammar allows.
        """
        try:
            if not self._matcher.consume_token(token):
                raise EngineError(f"The grammar cannot go on: {_brief(self._matcher.get_error())}.")
            return self._allowed(_next_mask(self._matcher, self._compiler.n_vocab))
        except TrioServeError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise EngineError(f"The grammar cannot go on: {error!r:.200}") from error

    def _allowed(self, mask: Mask) -> Mask:
        if not len(self._banned):
            return mask
        return mask.without(self._banned, self._compiler.end_ids, self._compiler.n_vocab)


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

    def start(self) -> None:
        """Have the masks made that are due.

        To be called just before a decode: that leaves the GIL to the threads of the pool, while
        sampling would have to share it with them.
        """
        if self.due:
            due, self.due = self.due, []
            for i in range(min(self._n_threads, len(due))):
                self._pool.submit(_advance, due[i :: self._n_threads])

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
            self._tokenizer = _make_tokenizer(self._vocab)
        try:
            if grammar.kind == "json_schema":
                matcher = _from_schema(json_schema.read(grammar.source), self._tokenizer)
            else:
                matcher = self._from_text(grammar, self._tokenizer)
            compiled = CompiledGrammar(grammar, self, matcher)
        except (gbnf.GbnfError, json_schema.SchemaError, _RefusedError) as error:
            raise _invalid(grammar, str(error)) from error
        except EngineError as error:
            raise _invalid(grammar, error.message.rstrip(".")) from error
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _CACHED_MAX:
                self._compiled.popitem(last=False)
        return compiled

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
            raise _RefusedError(_brief(matcher.get_error()))
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


class _Words:
    """The vocabulary as llguidance's `TokenizerWrapper` wants it.

    llguidance has a way of its own to call llama.cpp's tokenizer. It would do so with any text of
    a schema, and after the model is closed.
    """

    bos_token_id = None

    def __init__(self, vocab: Vocab) -> None:
        self.eos_token_id = min(vocab.end_of_generation)
        self.tokens = list(vocab.names)
        # What has a name and no text is no text to a grammar either.
        pairs = enumerate(zip(vocab.pieces, vocab.names, strict=True))
        self.special_token_ids = [token for token, (piece, name) in pairs if piece != name]
        self.fallback: LLTokenizer | None = None
        self._vocab = vocab

    def __call__(self, text: str) -> list[TokenId]:
        try:
            return list(self._vocab.tokenize(text, parse_special=False))
        except InvalidRequestError:  # a word too long for llama.cpp; any split will do
            return self.fallback.greedy_tokenize(text) if self.fallback is not None else []


def _make_tokenizer(vocab: Vocab) -> LLTokenizer:
    words = _Words(vocab)
    # This is done in two steps because llguidance keeps the GIL: 0.1 s each for 150,000 tokens.
    ends = sorted(vocab.end_of_generation)
    words.fallback = LLTokenizer(TokenizerWrapper(words), eos_token=ends, slices=[])
    return words.fallback.with_slices(LLTokenizer.json_slices())


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
        raise json_schema.SchemaError(_brief(str(error))) from error
    if problem := matcher.get_error():
        path = json_schema.locate(schema, problem, lambda part: attempt(part).get_error())
        raise json_schema.SchemaError(_brief(problem), path)
    return matcher


def _next_mask(matcher: LLMatcher, n_vocab: int) -> Mask:
    words = np.zeros(-(-n_vocab // 32), dtype=np.int32)
    try:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    except ValueError as error:
        raise EngineError(f"The grammar cannot go on: {_brief(str(error))}.") from error
    if matcher.is_error():
        raise EngineError(f"The grammar cannot go on: {_brief(matcher.get_error())}.")
    return Mask(words, n_vocab)


def _invalid(grammar: Grammar, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"'{grammar.param}' cannot be used: {problem}.", param=grammar.param)


def _brief(problem: str) -> str:
    """Make a part of a sentence of what llguidance says, without the drawing below it."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["unknown error"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = f"invalid regex: {causes[-1]}" if causes else lines[0]
    return text[:300].rstrip(" .:")


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
