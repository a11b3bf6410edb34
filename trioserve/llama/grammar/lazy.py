"""LazyMatcher: an output whose grammar does not begin at once.

It waits for reasoning to end, or for the marker of a tool call. Until then there is nothing to work
out, and any token may come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from trioserve.engine.text.triggers import TriggerScanner
from trioserve.errors import EngineError
from trioserve.llama.grammar import mask as masks
from trioserve.llama.grammar.mask import Mask
from trioserve.llama.grammar.matcher import CompiledGrammar, Matcher
from trioserve.types import TokenId

_BLANKS = b" \t\n\r"
_MAX_NEWLINES = 2


def matcher_for(compiled: CompiledGrammar, banned: Sequence[TokenId] = ()) -> Matcher | LazyMatcher:
    """Make what follows one output.

    Args:
        compiled: its grammar.
        banned: tokens that the request forbids.

    Raises:
        InvalidRequestError: the grammar begins with nothing but those.
    """
    if compiled.grammar.lazy:
        return LazyMatcher(compiled, banned)
    return compiled.matcher(banned)


class LazyMatcher:
    """Follows one output to the place where its grammar begins, and from there by a `Matcher`.

    A token may hold the end of a marker and more. What is more is the grammar's; blanks that the
    grammar does not begin with are dropped, and so are newlines that follow reasoning. If it
    allows no such beginning, the token is refused and another one is to be chosen.

    Where reasoning may come first, but the grammar may also begin at once, both are allowed, as
    long as both can be. If the grammar allows all of the marker of reasoning, that is its own.
    """

    def __init__(self, compiled: CompiledGrammar, banned: Sequence[TokenId]) -> None:
        grammar, compiler = compiled.grammar, compiled.compiler
        self._matcher = compiled.matcher(banned)
        self._renew = partial(compiled.matcher, banned)
        self._compiler = compiler
        self._banned = np.array(sorted(set(banned)), dtype=np.int32)
        self._gate: TriggerScanner | None = TriggerScanner(grammar.thinking, grammar.triggers)
        self._must_begin = grammar.required or not grammar.triggers
        #: Whether reasoning, or else the grammar, is to begin.
        self._is_open = not grammar.triggers and bool(self._gate.missing)
        self._can_match = self._is_open  # the grammar, from the start
        self._refused: list[TokenId] = []
        self._n_newlines = 0 if grammar.triggers else _MAX_NEWLINES  # that may still come

    def mask(self) -> Mask | None:
        """Return which tokens may come next, or None if all may.

        Raises:
            EngineError: no token is left, or as `Matcher.mask`.
        """
        n_vocab = self._compiler.n_vocab
        if self._gate is None:
            allowed = self._matcher.mask()
            if not self._n_newlines:
                return allowed
            newlines = self._compiler.newlines(self._n_newlines)
            return allowed.joined(np.setdiff1d(newlines, self._banned))
        if self._is_open:
            openers = self._compiler.names.openers(self._gate.missing)
            openers = np.setdiff1d(openers, [*self._banned, *self._refused])
            if self._can_match:
                return self._matcher.mask().joined(openers)
            return masks.of(openers, n_vocab)
        if not self._refused:
            return self._compiler.no_end if self._must_begin else None
        hidden = [*self._refused, *(self._compiler.ends if self._must_begin else ())]
        return masks.all_but(np.array(hidden, dtype=np.int32), n_vocab)

    def accept(self, token: TokenId) -> bool:
        """Go on with a token; returns whether it can. If not, the next mask is without it.

        Raises:
            EngineError: the mask does not allow it.
        """
        if self._gate is None:
            return self._accept_late(token)
        if self._can_match and token in self._matcher.mask():
            self._accept_both(token)
            return True
        if token in self._compiler.ends:
            if self._must_begin:
                raise EngineError(f"The grammar does not allow token {token}, which was chosen.")
            return True
        gate = self._gate.fork()
        rest = gate.feed(self._compiler.name_of(token))
        if rest is not None and not self._begin(rest):
            self._refused.append(token)
            return False
        self._refused.clear()
        self._gate = gate if rest is None else None
        if self._is_open and not gate.missing:  # reasoning begins
            self._matcher.close()
            self._matcher, self._is_open = self._renew(), False
        self._can_match = False
        return True

    def _accept_both(self, token: TokenId) -> None:
        """Take a token that the grammar allows, and reasoning perhaps, too."""
        assert self._gate is not None
        self._matcher.accept(token)
        if self._gate.feed(self._compiler.name_of(token)) is not None or not self._gate.missing:
            self._gate, self._n_newlines = None, 0

    def _accept_late(self, token: TokenId) -> bool:
        is_newline = token in self._compiler.newlines(self._n_newlines)
        if is_newline and token not in self._matcher.mask():
            self._n_newlines -= len(self._compiler.name_of(token))
            return True
        self._n_newlines = 0
        return self._matcher.accept(token)

    def _begin(self, text: bytes) -> bool:
        if text:
            self._n_newlines = 0
        return self._matcher.begin(text) or self._matcher.begin(text.lstrip(_BLANKS))

    def close(self) -> None:
        """Drop it."""
        self._matcher.close()
