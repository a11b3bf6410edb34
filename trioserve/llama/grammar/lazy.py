"""LazyMatcher: follows an output that its grammar covers only from some place on.

That place comes after reasoning, or after a trigger such as the marker of a tool call. Until then
any token may come, and there is no mask to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from trioserve.engine.reasoning import TriggerScanner
from trioserve.errors import OutputError
from trioserve.llama.grammar.masks import Mask, all_but, none_but
from trioserve.llama.grammar.matcher import CompiledGrammar, Matcher
from trioserve.types import TokenId

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
        #: Whether the output may not end before the grammar has begun.
        self._required = grammar.required or not grammar.triggers
        #: Whether reasoning may begin, or else the grammar, with nothing in between.
        self._may_think = not grammar.triggers and bool(self._scanner.missing)
        #: Whether all of the output so far may also be the grammar's.
        self._may_match = self._may_think
        self._refused: list[TokenId] = []
        #: How many newlines may still be skipped.
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
            self._accept_in_both(token)
            return True
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

    def _accept_in_both(self, token: TokenId) -> None:
        """Take a token that the grammar allows, and perhaps the start marker of reasoning too."""
        assert self._scanner is not None
        self._matcher.accept(token)
        if self._scanner.feed(self._tokens.name_of(token)) is not None or not self._scanner.missing:
            self._scanner, self._n_newlines = None, 0

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
        """Drop it."""
        self._matcher.close()
