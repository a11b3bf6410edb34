"""Guesses from n-grams: the tokens that followed the same few tokens the last time."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import attrs

from trioserve.engine.backend import DraftRequest
from trioserve.types import CacheRoot, TokenId


class NgramIndex:
    """A text, and the last place of every `n` consecutive tokens in it.

    Adding a token takes constant time and about 120 bytes. When the text is longer than `n_max`,
    the oldest ``n_max / 2`` tokens are dropped at once.
    """

    def __init__(self, n: int, n_max: int) -> None:
        self.n = n
        self.n_added = 0
        self._half = max(n + 1, n_max // 2)
        self._text = array("i")
        self._places: dict[int, int] = {}  # by hash: a false guess is only a guess
        self._n_repeated = 0  # tokens at the beginning of the text that the old one ends with
        self._old: tuple[array[int], dict[int, int]] = (array("i"), {})

    def __len__(self) -> int:
        return len(self._text) - self._n_repeated + len(self._old[0])

    def add(self, tokens: Sequence[TokenId]) -> None:
        self.n_added += len(tokens)
        start = 0
        while start < len(tokens):
            stop = start + self._half - len(self._text)
            self._add(tokens[start:stop])
            start = stop

    def _add(self, tokens: Sequence[TokenId]) -> None:
        n, text = self.n, self._text
        first = max(n, len(text))
        text.extend(tokens)
        if len(text) <= n:
            return
        if len(tokens) == 1:
            self._places[hash(tuple(text[-n - 1 : -1]))] = len(text) - 1
        else:
            new = text[first - n :]
            ngrams = zip(*(new[i : len(new) - n + i] for i in range(n)), strict=True)
            self._places.update(zip(map(hash, ngrams), range(first, len(text)), strict=True))
        if len(text) >= self._half:
            self._old = text, self._places
            self._text, self._places = text[-n:], {}
            self._n_repeated = n

    @property
    def text(self) -> array[int]:
        """The part of the text that is still kept."""
        return self._old[0] + self._text[self._n_repeated :]

    def continuation(self, n_max: int) -> Sequence[TokenId]:
        """Guess the next `n_max` tokens of the text if it repeats itself.

        ::

            ... a b c d e f g h a b c          n = 3
                      |-----------|            what came after "a b c", and is repeated
        """
        guess = self.guess(self._text[-self.n :], n_max)
        n_left = n_max - len(guess)
        return [*guess, *itertools.islice(itertools.cycle(guess), n_left)] if guess else ()

    def guess(self, last: Sequence[TokenId], n_max: int) -> Sequence[TokenId]:
        """Return up to `n_max` tokens that came after the last `n` of some text."""
        if len(last) < self.n:
            return ()
        key = hash(tuple(last[-self.n :]))
        for text, places in ((self._text, self._places), self._old):
            place = places.get(key)
            if place is not None:
                return text[place : place + n_max].tolist()
        return ()


#: The most tokens of a request's own text that are indexed, 4 MB, and of all texts together, 31 MB.
MAX_OWN = 2**15
MAX_SHARED = 2**18


@attrs.frozen(kw_only=True)
class NgramRules:
    """Settings of n-gram drafts."""

    name: str  # the type of speculative decoding
    n: int  # the last tokens that must be the same
    n_min: int = 1  # shorter guesses are not made
    n_max: int  # nor longer ones
    #: Whether to look at the texts of earlier requests, too.
    shared: bool = False


class NgramDrafter:
    """Guesses the tokens that followed the same n-gram in the request's text, or in earlier texts.

    A request's text is its prompt and the output so far. When the request has ended, its text is
    added to those that all requests with the same root share.
    """

    is_free = pays = True
    step_s = 0.0

    def __init__(self, rules: NgramRules) -> None:
        self.name = rules.name
        self.n_max = rules.n_max
        self._rules = rules
        self._own: dict[int, tuple[NgramIndex, CacheRoot]] = {}  # by slot
        self._shared: OrderedDict[CacheRoot, NgramIndex] = OrderedDict()  # the one used last last

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[TokenId]]:
        """Guess the next tokens, and learn the new ones."""
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> Sequence[TokenId]:
        rules, keys = self._rules, request.keys
        index, _ = self._own.get(request.slot_id) or self._begin(request)
        index.add(keys[index.n_added :])
        n_max = min(rules.n_max, request.n_max)
        last = keys[-rules.n :]
        guess = index.continuation(n_max)
        if not guess and (shared := self._shared.get(request.root)) is not None:
            guess = shared.guess(last, n_max)
        return guess if len(guess) >= rules.n_min else ()

    def _begin(self, request: DraftRequest) -> tuple[NgramIndex, CacheRoot]:
        begun = NgramIndex(self._rules.n, MAX_OWN), request.root
        self._own[request.slot_id] = begun
        return begun

    def forget(self, slot_id: int) -> None:
        """Add the slot's text to those of earlier requests."""
        if slot_id not in self._own:
            return
        own, root = self._own.pop(slot_id)
        if not self._rules.shared:
            return
        if root not in self._shared:
            self._shared[root] = NgramIndex(self._rules.n, MAX_SHARED // 2)
        self._shared[root].add(own.text)
        self._shared.move_to_end(root)
        while self.n_shared > MAX_SHARED:
            self._shared.popitem(last=False)

    @property
    def n_shared(self) -> int:
        return sum(map(len, self._shared.values()))

    def close(self) -> None:
        self._own.clear()
        self._shared.clear()
