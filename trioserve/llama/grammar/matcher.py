"""Matchers: each follows one output through its grammar, and has the next mask made by a pool."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from llguidance import LLMatcher

from trioserve.engine.helpers import start_all
from trioserve.engine.reasoning import TriggerScanner
from trioserve.errors import InvalidRequestError, OutputError, TrioServeError
from trioserve.llama.grammar.json_schema import brief
from trioserve.llama.grammar.tokens import GrammarVocab, Mask, all_but, none_but
from trioserve.llama.grammar.tools import MAX_ENFORCED, ToolGrammar
from trioserve.types import Constraint, Grammar, TokenId

#: Seconds that the inference thread waits for a mask; it should take a thousandth of that.
_WAIT_SECONDS = 5.0

#: A function that makes a mask, the token it takes, and where the mask goes.
Job = tuple[Callable[[TokenId], Mask], TokenId, Future[Mask]]


class MaskPool:
    """A small pool of threads, for the inference thread and those that sample beside it.

    Args:
        n_threads: how many masks can be made at the same time.

    Raises:
        ModelLoadError: the system refuses the threads.
    """

    def __init__(self, n_threads: int) -> None:
        #: Masks to make with the next `start`, by where they go.
        self.due: dict[Future[Mask], Job] = {}
        self._lock = threading.Lock()
        self._n_threads = max(1, n_threads)
        self._executor = ThreadPoolExecutor(self._n_threads, thread_name_prefix="trioserve-grammar")
        start_all(self._executor, self._n_threads)

    def put(self, make: Callable[[TokenId], Mask], token: TokenId, pending: Future[Mask]) -> None:
        """Queue a mask for the next `start`, which may have been taken back."""
        with self._lock:
            self.due[pending] = make, token, pending

    def take_back(self, pending: Future[Mask]) -> bool:
        """Remove a mask from the queue; returns whether it was not begun."""
        with self._lock:
            return self.due.pop(pending, None) is not None

    def start(self) -> None:
        """Start making the queued masks.

        To be called just before a decode, which leaves the GIL to the pool. Sampling would have to
        share it.
        """
        with self._lock:
            due = list(self.due.values())
            self.due.clear()
        for i in range(min(self._n_threads, len(due))):
            self._executor.submit(_make, due[i :: self._n_threads])

    def result(self, pending: Future[Mask]) -> Mask:
        """Wait for a mask. Raises what its job raised, or `TimeoutError`."""
        with self._lock:
            job = self.due.pop(pending, None)
        if job is not None:  # nothing was decoded since it was queued
            self._executor.submit(_make, [job])
        return pending.result(_WAIT_SECONDS)

    def close(self) -> None:
        """Drop the jobs that have not started, and wait for the others."""
        with self._lock:
            self.due.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _make(jobs: list[Job]) -> None:
    for make, token, pending in jobs:
        if not pending.set_running_or_notify_cancel():
            continue  # its task is gone
        try:
            pending.set_result(make(token))
        except TrioServeError as error:
            pending.set_exception(error)


#: llguidance's messages when it reaches one of its limits.
_LIMIT = re.compile("too many|too big|max is|fuel|limit")


class CompiledGrammar(Constraint):
    """A grammar in llguidance's form, and the tokens that an output may begin with.

    Args:
        grammar: what was compiled.
        matcher: llguidance's, at the beginning of the grammar; it is copied for each output.
        tokens: the vocabulary.
        pool: makes the masks.
        on_error: called when llguidance fails, so that the grammar is compiled again next time.
        tools: compiles the rest, if it is a grammar that grows.
    """

    __slots__ = ("_matcher", "first", "on_error", "pool", "tokens", "tools")

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        tokens: GrammarVocab,
        pool: MaskPool,
        on_error: Callable[[CompiledGrammar], None],
        tools: ToolGrammar | None = None,
    ) -> None:
        super().__init__(grammar)
        self.tokens, self.pool, self.on_error, self.tools = tokens, pool, on_error, tools
        self._matcher = matcher
        self.first = _next_mask(matcher, self)

    @property
    def n_bytes(self) -> int:
        """The memory that it takes, roughly: 0.2 to 5 MB were measured."""
        size = len(self.grammar.source)
        return 2 * 10**5 + 50 * size if self.tools is None else 5 * 10**6 + 5 * size

    def matcher(self, banned: Sequence[TokenId] = ()) -> Matcher:
        """Make a matcher for one output, which the grammar covers from its beginning.

        Args:
            banned: tokens that the request forbids.

        Raises:
            InvalidRequestError: the grammar begins with nothing but those.
        """
        return Matcher(self, self._matcher.deep_copy(), banned)


class _Growth:
    """The calls of an output to functions whose arguments are enforced once they are named."""

    def __init__(self, tools: ToolGrammar) -> None:
        self._tools = tools
        self._tokens: list[TokenId] = []  # all that were taken
        self._tail = tools.names.START  # the last of their text
        self._enforced: frozenset[int] = frozenset()

    def take(self, tokens: Sequence[TokenId], text: bytes) -> None:
        """Note tokens that are taken, and their text."""
        self._tokens += tokens
        self._tail = (self._tail + text)[-self._tools.names.size - len(text) :]

    def grown(self, text: bytes = b"") -> LLMatcher | None:
        """Compile the grammar with the functions that are named now; None if there are no new ones.

        The matcher has taken the same tokens.

        Args:
            text: that comes next.
        """
        found = self._tools.names.find(self._tail + text) - self._enforced
        if not found:
            return None
        every = found | self._enforced
        self._enforced = found if len(every) > MAX_ENFORCED else every
        matcher = self._tools.enforcing(self._enforced)
        # A name that is a part of a text may be found again later.
        fits = matcher is not None and (not self._tokens or matcher.consume_tokens(self._tokens))
        return matcher if fits else None


class Matcher:
    """Follows one output through a grammar.

    For the inference thread; the next mask is made by a thread of the pool.
    """

    def __init__(
        self, compiled: CompiledGrammar, matcher: LLMatcher, banned: Sequence[TokenId]
    ) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._tokens, self._pool = compiled.tokens, compiled.pool
        self._banned = np.array(sorted(set(banned)), dtype=np.int32)
        self._mask: Mask | None = self._allowed(compiled.first)
        self._pending: Future[Mask] | None = None
        self._is_ahead = False  # has taken the token before the pending mask
        self._growth = None if compiled.tools is None else _Growth(compiled.tools)

    def mask(self) -> Mask:
        """Return which tokens may come next; waits until that is known.

        Raises:
            OutputError: llguidance failed or takes too long, or the output has ended.
            InvalidRequestError: the grammar takes too much to follow, or the request forbids every
                token that it allows.
        """
        if self._mask is None:
            if self._pending is None:
                raise OutputError("The output has ended, or its grammar is closed.")
            try:
                self._mask = self._pool.result(self._pending)
            except TimeoutError:
                raise OutputError("The grammar takes too long to follow.") from None
            except TrioServeError:
                # Other tasks share some of llguidance's state, which may have reached a limit.
                self._compiled.on_error(self._compiled)
                raise
            self._pending = None
        return self._mask

    def begin(self, text: bytes) -> bool:
        """Take the text that the output begins with, if the grammar allows it.

        Returns whether it does; if not, nothing has changed.

        Raises:
            OutputError: llguidance failed.
            InvalidRequestError: the grammar takes too much to follow.
        """
        tokens = self._tokens.split(text)
        if not tokens:
            return True
        grown = None if self._growth is None else self._growth.grown(text)
        matcher = self._matcher if grown is None else grown
        if matcher.validate_tokens(tokens) < len(tokens):
            return False
        self._matcher = matcher
        if self._growth is not None:
            self._growth.take(tokens, text)
        if len(tokens) > 1 and not self._matcher.consume_tokens(tokens[:-1]):
            raise _failure(self._matcher.get_error(), self._compiled)
        self._advance_later(tokens[-1])
        return True

    def accept(self, token: TokenId) -> bool:
        """Take a token that the mask allows. `MaskPool.start` has the next mask made.

        A token may complete the name of a function and contain text that its arguments forbid.
        Such a token is refused, and the next mask excludes it. Returns whether the token is taken.

        Raises:
            OutputError: the mask does not allow it.
        """
        if self._mask is None or token not in self._mask:
            raise OutputError(f"The grammar does not allow token {token}, which was chosen.")
        if self._growth is not None and not self._grow(self._growth, token):
            return False
        self._advance_later(token)
        return True

    def _grow(self, growth: _Growth, token: TokenId) -> bool:
        """Enforce the arguments of functions that a token names; returns whether it fits them."""
        text = self._tokens.name_of(token)
        if (grown := growth.grown(text)) is not None:
            self._matcher = grown
            if not grown.validate_tokens([token]):
                self._mask = self._allowed(_next_mask(grown, self._compiled))
                return False
        growth.take([token], text)
        return True

    def forced(self, n_max: int) -> list[TokenId]:
        """Take the next tokens that the grammar leaves no choice about, `n_max` at most.

        Returns no tokens if the request forbids some, because the grammar does not know about that.

        Raises:
            OutputError: llguidance failed.
            InvalidRequestError: as `mask`.
        """
        pending = self._pending
        if pending is None or len(self._banned) or not self._pool.take_back(pending):
            return []
        try:
            if not self._is_ahead:
                self._consume([self._newest])
                self._is_ahead = True
            tokens = self._matcher.compute_ff_tokens()[:n_max]
            if not self._tokens.ends.isdisjoint(tokens):
                tokens = []
            self._consume(tokens)
        except TrioServeError:
            self._compiled.on_error(self._compiled)
            raise
        if self._growth is not None:
            self._growth.take(tokens, b"".join(map(self._tokens.name_of, tokens)))
            self._matcher = self._growth.grown() or self._matcher
        self._pool.put(self.advance, self._newest, pending)
        return tokens

    def _consume(self, tokens: list[TokenId]) -> None:
        try:
            if not self._matcher.consume_tokens(tokens):
                raise _failure(self._matcher.get_error(), self._compiled)
        except TrioServeError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise OutputError("The grammar cannot be followed.") from error

    def _advance_later(self, token: TokenId) -> None:
        self._mask, self._newest, self._is_ahead = None, token, False
        if token not in self._tokens.ends:
            self._pending = Future()
            self._pool.put(self.advance, token, self._pending)

    def close(self) -> None:
        """Drop it. If a mask is being made, its thread finishes and then drops it."""
        if self._pending is not None:
            self._pending.cancel()
        self._mask = self._pending = None

    def advance(self, token: TokenId) -> Mask:
        """Make the mask that follows a token, or what was forced after it.

        No other thread uses the matcher meanwhile.

        Raises:
            OutputError: llguidance failed.
            InvalidRequestError: as `mask`.
        """
        try:
            if not self._is_ahead:
                self._consume([token])
            return self._allowed(_next_mask(self._matcher, self._compiled))
        except TrioServeError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise OutputError("The grammar cannot be followed.") from error

    def _allowed(self, mask: Mask) -> Mask:
        if not len(self._banned):
            return mask
        return mask.without(self._banned, self._tokens.end_ids)


def _next_mask(matcher: LLMatcher, compiled: CompiledGrammar) -> Mask:
    """Ask llguidance for the tokens that may come next. Raises the result of `_failure`."""
    n_vocab = compiled.tokens.n_vocab
    words = np.zeros(-(-n_vocab // 32), dtype=np.int32)
    try:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    except ValueError as error:
        raise _failure(str(error), compiled) from error
    if matcher.is_error():
        raise _failure(matcher.get_error(), compiled)
    return Mask(words, n_vocab)


def _failure(problem: str, compiled: CompiledGrammar) -> TrioServeError:
    """Make an error of llguidance's: it is the request's where a limit was reached."""
    if _LIMIT.search(problem):
        param = compiled.grammar.param
        return InvalidRequestError.at(param, "cannot be used: it takes too much to follow.")
    if problem.startswith("NoExtension"):
        problem = "no text matches it"
    return OutputError(f"The grammar cannot be followed: {brief(problem)}.")


_BLANKS = b" \t\n\r"
_MAX_NEWLINES = 2


def matcher_for(compiled: CompiledGrammar, banned: Sequence[TokenId] = ()) -> Matcher | LazyMatcher:
    """Make the matcher of one output, lazy if its grammar is.

    Args:
        compiled: the grammar.
        banned: tokens that the request forbids.

    Raises:
        InvalidRequestError: the grammar begins with nothing but those.
    """
    if compiled.grammar.lazy:
        return LazyMatcher(compiled, banned)
    return compiled.matcher(banned)


class LazyMatcher:
    """Follows one output up to where its grammar begins, and from there with a `Matcher`.

    The token that completes a trigger may hold more text. The grammar must allow that text as its
    beginning, with or without leading blanks. If it does not, the token is refused and another one
    is chosen. Newlines between reasoning and the grammar are skipped.

    Where reasoning is optional, the output may begin with either, and both are allowed while both
    are possible. If the grammar allows the whole start marker of reasoning, the marker is the
    grammar's.
    """

    def __init__(self, compiled: CompiledGrammar, banned: Sequence[TokenId]) -> None:
        grammar, self._tokens = compiled.grammar, compiled.tokens
        self._matcher = compiled.matcher(banned)
        self._renew = partial(compiled.matcher, banned)
        self._banned = np.array(sorted(set(banned)), dtype=np.int32)
        #: None once the grammar has begun.
        self._scanner: TriggerScanner | None = TriggerScanner(grammar.thinking, grammar.triggers)
        #: The output may not end before the grammar has begun.
        self._required = grammar.required or not grammar.triggers
        #: Reasoning may begin, or else the grammar, with nothing in between.
        self._may_think = not grammar.triggers and bool(self._scanner.missing)
        #: All of the output so far may also be the grammar's.
        self._may_match = self._may_think
        self._refused: list[TokenId] = []
        #: The newlines that may still be skipped.
        self._n_newlines = 0 if grammar.triggers else _MAX_NEWLINES

    def mask(self) -> Mask | None:
        """Return which tokens may come next, or None if all may.

        Raises:
            EngineError: no token is left, or as `Matcher.mask`.
        """
        n_vocab = self._tokens.n_vocab
        if self._scanner is None:
            allowed = self._matcher.mask()
            if not self._n_newlines:
                return allowed
            newlines = self._tokens.newlines(self._n_newlines)
            return allowed.joined(np.setdiff1d(newlines, self._banned))
        if self._may_think:
            openers = self._tokens.names.openers(self._scanner.missing)
            openers = np.setdiff1d(openers, [*self._banned, *self._refused])
            if self._may_match:
                return self._matcher.mask().joined(openers)
            return none_but(openers, n_vocab)
        if not self._refused:
            return self._tokens.no_end if self._required else None
        hidden = [*self._refused, *(self._tokens.ends if self._required else ())]
        return all_but(np.array(hidden, dtype=np.int32), n_vocab)

    def accept(self, token: TokenId) -> bool:
        """Take a token, or refuse it and return False; the next mask is then without it.

        Raises:
            EngineError: the mask does not allow it.
        """
        if self._scanner is None:
            return self._accept_in_grammar(token)
        if self._may_match and token in self._matcher.mask():
            return self._accept_in_both(token)
        if token in self._tokens.ends:
            if self._required:
                raise OutputError(f"The grammar does not allow token {token}, which was chosen.")
            return True
        scanner = self._scanner.fork()
        rest = scanner.feed(self._tokens.name_of(token))
        if rest is not None and not self._begin(rest):
            self._refused.append(token)
            return False
        self._refused.clear()
        self._scanner = scanner if rest is None else None
        if self._may_think and not scanner.missing:  # reasoning has begun
            self._matcher.close()
            self._matcher, self._may_think = self._renew(), False
        self._may_match = False
        return True

    def forced(self, n_max: int) -> list[TokenId]:
        """Take the tokens that must come next, once the grammar has begun; `n_max` at most.

        Raises:
            EngineError: as `Matcher.forced`.
        """
        if self._scanner is not None or self._n_newlines:
            return []
        return self._matcher.forced(n_max)

    def _accept_in_both(self, token: TokenId) -> bool:
        """Take a token that the grammar allows, and perhaps the start marker of reasoning too."""
        assert self._scanner is not None
        if not self._matcher.accept(token):
            return False
        if self._scanner.feed(self._tokens.name_of(token)) is not None or not self._scanner.missing:
            self._scanner, self._n_newlines = None, 0
        return True

    def _accept_in_grammar(self, token: TokenId) -> bool:
        is_newline = token in self._tokens.newlines(self._n_newlines)
        if is_newline and token not in self._matcher.mask():
            self._n_newlines -= len(self._tokens.name_of(token))
            return True
        self._n_newlines = 0
        return self._matcher.accept(token)

    def _begin(self, text: bytes) -> bool:
        if text:
            self._n_newlines = 0
        return self._matcher.begin(text) or self._matcher.begin(text.lstrip(_BLANKS))

    def close(self) -> None:
        """Free the matcher."""
        self._matcher.close()
