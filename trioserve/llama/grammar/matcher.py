"""Matcher: follows one output through a compiled grammar, token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher

from trioserve.errors import InvalidRequestError, OutputError, TrioServeError
from trioserve.llama.grammar.masks import Mask
from trioserve.llama.grammar.pool import MaskPool
from trioserve.llama.grammar.tokens import Tokens
from trioserve.types import Constraint, Grammar, TokenId

#: What llguidance says when it reaches one of the limits that it was given.
_LIMIT = re.compile("too many|too big|max is|fuel|limit")


class CompiledGrammar(Constraint):
    """A grammar in llguidance's form, and the tokens that an output may begin with.

    Args:
        grammar: what was compiled.
        matcher: llguidance's, at the beginning of the grammar; it is copied for each output.
        tokens: the vocabulary.
        pool: makes the masks.
        on_error: called when llguidance fails, so that the grammar is compiled anew next time.
    """

    __slots__ = ("_matcher", "first", "on_error", "pool", "tokens")

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        tokens: Tokens,
        pool: MaskPool,
        on_error: Callable[[CompiledGrammar], None],
    ) -> None:
        super().__init__(grammar)
        self.tokens, self.pool, self.on_error = tokens, pool, on_error
        self._matcher = matcher
        self.first = _next_mask(matcher, self)

    def matcher(self, banned: Sequence[TokenId] = ()) -> Matcher:
        """Make a matcher for one output, which the grammar covers from its beginning.

        Args:
            banned: tokens that the request forbids.

        Raises:
            InvalidRequestError: the grammar begins with nothing but those.
        """
        return Matcher(self, self._matcher.deep_copy(), banned)


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
        self._is_ahead = False  # has taken the token that the pending mask is to follow

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
        if self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        if len(tokens) > 1 and not self._matcher.consume_tokens(tokens[:-1]):
            raise _failure(self._matcher.get_error(), self._compiled)
        self._advance_later(tokens[-1])
        return True

    def accept(self, token: TokenId) -> bool:
        """Take a token that the mask allows. `MaskPool.start` has the next mask made.

        Returns True always, which a `LazyMatcher` does not.

        Raises:
            OutputError: the mask does not allow it.
        """
        if self._mask is None or token not in self._mask:
            raise OutputError(f"The grammar does not allow token {token}, which was chosen.")
        self._advance_later(token)
        return True

    def forced(self, n_max: int) -> list[TokenId]:
        """Take the tokens for which the masks to come would leave no choice, `n_max` at most.

        There are none where the request forbids tokens, which the grammar does not know.

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
            self._pending = self._pool.add(self.advance, token)

    def close(self) -> None:
        """Drop it. If a mask is being made, its thread finishes and then drops it."""
        if self._pending is not None:
            self._pending.cancel()
        self._mask = self._pending = None

    def advance(self, token: TokenId) -> Mask:
        """Make the mask that follows a token, or what was forced after it.

        Nobody else uses the matcher meanwhile.

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
    """Ask llguidance which tokens may come next. Raises what `_failure` returns."""
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
        return InvalidRequestError(
            f"'{param}' cannot be used: it takes too much to follow.", param=param
        )
    if problem.startswith("NoExtension"):
        problem = "no text matches it"
    return OutputError(f"The grammar cannot be followed: {brief(problem)}.")


def brief(problem: str) -> str:
    """Shorten an error of llguidance to a part of a sentence, without the drawing below it."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["unknown error"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = f"invalid regex: {causes[-1]}" if causes else lines[0]
    return text[:300].rstrip(" .:")
