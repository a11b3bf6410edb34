"""Matcher: follows one output through a grammar, token by token.

When a token was chosen, a thread of a small pool works out which tokens may follow it while
`llama_decode` runs, so that the inference thread finds the answer ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher

from trioserve.errors import EngineError, TrioServeError
from trioserve.llama.grammar.mask import Mask
from trioserve.types import Constraint, Grammar, TokenId

if TYPE_CHECKING:
    from trioserve.llama.grammar.grammar import Compiler

#: Seconds that the inference thread waits for a mask; it should take a thousandth of that.
_WAIT_SECONDS = 5.0


class CompiledGrammar(Constraint):
    """A grammar in llguidance's form, and the tokens that an output may begin with."""

    __slots__ = ("_matcher", "compiler", "first")

    def __init__(self, grammar: Grammar, compiler: Compiler, matcher: LLMatcher) -> None:
        super().__init__(grammar)
        self.compiler = compiler
        self._matcher = matcher
        self.first = next_mask(matcher, compiler.n_vocab)

    def matcher(self, banned: Sequence[TokenId] = ()) -> Matcher:
        """Make what follows one output.

        Args:
            banned: tokens that the request forbids.

        Raises:
            InvalidRequestError: the grammar begins with nothing but those.
        """
        return Matcher(self, self._matcher.deep_copy(), self.compiler, banned)


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

    def begin(self, text: bytes) -> bool:
        """Take text that the output begins with, if the grammar allows it; else nothing changes.

        Raises:
            EngineError: llguidance gave up.
        """
        tokens = self._compiler.split(text)
        if not tokens:
            return True
        if self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        if len(tokens) > 1 and not self._matcher.consume_tokens(tokens[:-1]):
            raise EngineError(f"The grammar cannot go on: {brief(self._matcher.get_error())}.")
        self._go_on(tokens[-1])
        return True

    def accept(self, token: TokenId) -> bool:
        """Go on with a token that the mask allows; `Compiler.start` has the next mask made.

        Returns that it can, which a `LazyMatcher` cannot always.

        Raises:
            EngineError: the mask does not allow it.
        """
        if self._mask is None or token not in self._mask:
            raise EngineError(f"The grammar does not allow token {token}, which was chosen.")
        self._go_on(token)
        return True

    def _go_on(self, token: TokenId) -> None:
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
                raise EngineError(f"The grammar cannot go on: {brief(self._matcher.get_error())}.")
            return self._allowed(next_mask(self._matcher, self._compiler.n_vocab))
        except TrioServeError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise EngineError(f"The grammar cannot go on: {error!r:.200}") from error

    def _allowed(self, mask: Mask) -> Mask:
        if not len(self._banned):
            return mask
        return mask.without(self._banned, self._compiler.end_ids)


def advance_all(due: list[tuple[Matcher, TokenId, Future[Mask]]]) -> None:
    """Make masks, in a thread of the pool."""
    for matcher, token, pending in due:
        if not pending.set_running_or_notify_cancel():
            continue  # its task is gone
        try:
            pending.set_result(matcher.advance(token))
        except TrioServeError as error:
            pending.set_exception(error)


def next_mask(matcher: LLMatcher, n_vocab: int) -> Mask:
    """Ask llguidance which tokens may come next.

    Raises:
        EngineError: it gave up, or allows none.
    """
    words = np.zeros(-(-n_vocab // 32), dtype=np.int32)
    try:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    except ValueError as error:
        raise EngineError(f"The grammar cannot go on: {brief(str(error))}.") from error
    if matcher.is_error():
        raise EngineError(f"The grammar cannot go on: {brief(matcher.get_error())}.")
    return Mask(words, n_vocab)


def brief(problem: str) -> str:
    """Make a part of a sentence of what llguidance says, without the drawing below it."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["unknown error"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = f"invalid regex: {causes[-1]}" if causes else lines[0]
    return text[:300].rstrip(" .:")
