"""GBNF, llama.cpp's notation of grammars, turned into the Lark notation of llguidance.

llguidance splits text into lexemes before it parses, and a lexeme takes as much as it can; GBNF has
no lexemes. So each rule that does not refer to itself becomes one lexeme, in effect a regular
expression, and means what it means in llama.cpp. In a recursive rule, what stands between the
references to recursive rules becomes lexemes. Such a lexeme may swallow the beginning of what
follows it: some texts of the language then cannot be written, but none is added. Free text up to a
marker, as in ``.* "=" object``, would swallow all that follows, and never end: there the first
marker with the beginning of an object behind it ends the text.

Our own code by decision: llguidance's `gbnf_to_lark` makes each literal and class a lexeme, so that
``("a" | "ab") "b"`` refuses ``ab``, and it knows no tokens.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import attrs

from trioserve.chat.grammar.schemas import quoted

_MAX_DEPTH = 32  # parentheses in parentheses
_MAX_RULES = 2000
_MAX_REPEATS = 2000  # as in llama.cpp
_MAX_STEPS = 100_000  # to find out what can follow what
_MAX_SPLICED = 10_000  # items that are put in the places of others

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_DIGITS = 12  # of a number: enough to see that it is too large
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_REPEAT = re.compile(r"\{[ \t]*+([0-9]++)[ \t]*+(,?)[ \t]*+([0-9]*+)[ \t]*+\}")
_TOKEN = re.compile(r"(!?)<(?:\[([0-9]+)\]|([^>\[\]\r\n]+))>")
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\\\"\[\]-]))"
)
_SINGLE = {"n": "\n", "r": "\r", "t": "\t", **{char: char for char in '\\"[]-'}}


class GbnfError(Exception):
    """The text is not GBNF. The message describes the error and names its line."""


@attrs.frozen
class _Text:
    """A literal or a character class, in Lark.

    Args:
        lark: how it is written.
        chars: which characters each place of it can have; see `_chars`.
        is_free: whether it is any character but some.
    """

    lark: str
    chars: tuple[int, ...]
    is_free: bool = False


@attrs.frozen
class _Token:
    """A token of the vocabulary, in Lark."""

    lark: str


@attrs.frozen
class _Ref:
    """A reference to a rule."""

    name: str
    pos: int


@attrs.frozen
class _Repeat:
    item: _Item
    suffix: str


@attrs.frozen
class _Group:
    """Alternatives, each of them a sequence."""

    alternatives: tuple[tuple[_Item, ...], ...]


_Item = _Text | _Token | _Ref | _Repeat | _Group

#: Sets of characters, with a bit for each of ASCII and one for all others.
_OTHERS = 1 << 128
_ANY = 2 * _OTHERS - 1


def _chars(first: str, last: str) -> int:
    """Give the set of a range of characters."""
    low, high = min(ord(first), 128), min(ord(last), 128)
    return (2 << high) - (1 << low)


#: Turns the name of a token, such as ``<think>``, or an id, into Lark; None if it does not exist.
TokenNames = Callable[[str | int, bool], str | None]


def to_lark(text: str, tokens: TokenNames) -> str:
    """Translate a grammar from GBNF to Lark.

    Args:
        text: GBNF; its rule ``root`` is what the output must match.
        tokens: see `TokenNames`; the second argument is whether it is negated.

    Raises:
        GbnfError: it is not GBNF, or too large.
    """
    rules = _GbnfParser(text, tokens).rules()
    return _Writer(rules).lark()


class _GbnfParser:
    """Reads GBNF, one rule after another."""

    def __init__(self, text: str, tokens: TokenNames) -> None:
        self._text = text
        self._tokens = tokens
        self._pos = 0
        self._depth = 0

    def rules(self) -> dict[str, _Group]:
        rules: dict[str, _Group] = {}
        references: list[_Ref] = []
        self._skip(_SPACES)
        while self._pos < len(self._text):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            if not self._take("::="):
                self._fail("'::=' is missing")
            if name in rules:
                self._fail(f"there are two rules {name!r}")
            if len(rules) == _MAX_RULES:
                self._fail(f"there are more than {_MAX_RULES} rules")
            self._skip(_SPACES)
            rules[name] = self._group(nested=False)
            if self._pos < len(self._text) and self._text[self._pos] not in "\r\n":
                self._fail(f"{self._text[self._pos]!r} is unexpected here")
            self._skip(_SPACES)
            references += _references(rules[name])
        for reference in references:
            if reference.name not in rules:
                self._fail(f"there is no rule {reference.name!r}", reference.pos)
        if "root" not in rules:
            self._fail("there is no rule 'root'")
        return rules

    def _group(self, *, nested: bool) -> _Group:
        alternatives = [self._sequence(nested=nested)]
        while self._take("|"):
            self._skip(_SPACES)
            alternatives.append(self._sequence(nested=nested))
        return _Group(tuple(alternatives))

    def _sequence(self, *, nested: bool) -> tuple[_Item, ...]:
        items: list[_Item] = []
        space = _SPACES if nested else _SPACE
        self._skip(space)
        while (item := self._item()) is not None:
            self._skip(space)
            while suffix := self._suffix():
                item = _Repeat(item, suffix)
                self._skip(space)
            items.append(item)
        return tuple(items)

    def _item(self) -> _Item | None:
        text, pos = self._text, self._pos
        char = text[pos : pos + 1]
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if self._take("."):
            return _Text("/(?s:.)/", (_ANY,), is_free=True)
        if char in ("<", "!"):
            return self._token()
        if self._take("("):
            return self._parentheses()
        if name := _NAME.match(text, pos):
            self._pos = name.end()
            return _Ref(name[0], pos)
        return None

    def _parentheses(self) -> _Group:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"there are more than {_MAX_DEPTH} levels of parentheses")
        group = self._group(nested=True)
        if not self._take(")"):
            self._fail("')' is missing")
        self._depth -= 1
        return group

    def _literal(self) -> _Text:
        chars = []
        self._pos += 1
        while not self._take('"'):
            chars.append(self._char('"'))
        return _Text(quoted("".join(chars)), tuple(_chars(char, char) for char in chars))

    def _class(self) -> _Text:
        self._pos += 1
        parts = ["^"] if self._take("^") else []
        n_marks, found = len(parts), 0
        while not self._take("]"):
            first = last = self._char("]")
            if self._text[self._pos : self._pos + 1] == "-" and (
                self._text[self._pos + 1 : self._pos + 2] != "]"
            ):
                self._pos += 1
                last = self._char("]")
            if first > last:
                self._fail(f"the range from {first!r} to {last!r} is empty")
            parts.append(rf"\x{{{ord(first):x}}}-\x{{{ord(last):x}}}")
            found |= _chars(first, last)
        if len(parts) == n_marks:
            self._fail("the character class is empty")
        chars = (_ANY & ~found) | _OTHERS if n_marks else found
        return _Text(f"/[{''.join(parts)}]/", (chars,), is_free=n_marks > 0)

    def _char(self, end: str) -> str:
        char = self._text[self._pos : self._pos + 1]
        if char == "\\":
            match = self._match(_ESCAPE, "an escape sequence of GBNF")
            digits = match[1] or match[2] or match[3]
            code = int(digits, 16) if digits else ord(_SINGLE[match[4]])
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                self._fail(f"U+{code:04X} is not a character")
            return chr(code)
        if char in ("", "\n", "\r"):
            self._fail(f"{end!r} is missing")
        self._pos += 1
        return char

    def _token(self) -> _Token:
        pos = self._pos
        match = self._match(_TOKEN, "a token such as <[1000]> or <think>")
        token = int(match[2][:_DIGITS]) if match[2] else f"<{match[3]}>"
        lark = self._tokens(token, bool(match[1]))
        if lark is None:
            self._fail(f"there is no token {token}", pos)
        return _Token(lark)

    def _suffix(self) -> str:
        for sign in "*+?":
            if self._take(sign):
                return sign
        if self._text[self._pos : self._pos + 1] != "{":
            return ""
        match = self._match(_REPEAT, "a repetition such as {2}, {2,} or {2,4}")
        low, high = int(match[1][:_DIGITS]), int((match[3] or match[1])[:_DIGITS])
        if match[3] and not match[2]:
            self._fail("a repetition lacks a comma")
        if max(low, high) > _MAX_REPEATS:
            self._fail(f"more than {_MAX_REPEATS} repetitions")
        if low > high:
            self._fail(f"the minimum {low} of a repetition is above its maximum {high}")
        return f"{{{low},{match[3]}}}" if match[2] else f"{{{low}}}"

    def _skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self._text, self._pos)
        assert match is not None
        self._pos = match.end()

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._pos):
            self._pos += len(text)
            return True
        return False

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self._text, self._pos)
        if match is None:
            self._fail(f"this is not {what}: {self._text[self._pos : self._pos + 20]!r}")
        self._pos = match.end()
        return match

    def _fail(self, problem: str, pos: int | None = None) -> NoReturn:
        line = self._text.count("\n", 0, self._pos if pos is None else pos) + 1
        raise GbnfError(f"{problem} (line {line})")


def _leaves(item: _Item) -> Iterator[_Text | _Token | _Ref]:
    """Give all that an item is made of."""
    match item:
        case _Repeat(inner):
            yield from _leaves(inner)
        case _Group(alternatives):
            for part in itertools.chain(*alternatives):
                yield from _leaves(part)
        case _:
            yield item


def _references(item: _Item) -> Iterator[_Ref]:
    return (leaf for leaf in _leaves(item) if isinstance(leaf, _Ref))


def _has_token(item: _Item) -> bool:
    return any(isinstance(leaf, _Token) for leaf in _leaves(item))


class _Follow:
    """The characters that items begin with, and those that can follow rules; tokens do not count.

    The sets grow until nothing changes. Where that takes too long, they stay too small.
    """

    def __init__(self, rules: dict[str, _Group]) -> None:
        self._first = dict.fromkeys(rules, (0, False))
        self._after = dict.fromkeys(rules, 0)
        self._n_left = _MAX_STEPS
        users: dict[str, set[str]] = {name: set() for name in rules}
        for name, rule in rules.items():
            for reference in _references(rule):
                users[reference.name].add(name)
        waiting = dict.fromkeys(rules)
        while waiting and self._n_left > 0:
            name, _ = waiting.popitem()
            if (found := self.begin(rules[name])) != self._first[name]:
                self._first[name] = found
                waiting |= dict.fromkeys(users[name])
        waiting = dict.fromkeys(rules)
        while waiting and self._n_left > 0:
            name, _ = waiting.popitem()
            for target, chars in self._followed(rules[name], self._after[name]):
                if chars & ~self._after[target]:
                    self._after[target] |= chars
                    waiting[target] = None

    def begin(self, item: _Item) -> tuple[int, bool]:
        """The characters that an item can begin with, and whether it can be empty."""
        self._n_left -= 1
        match item:
            case _Text(_, places):
                return (places[0], False) if places else (0, True)
            case _Ref(name):
                return self._first[name]
            case _Repeat(inner, suffix):
                first, is_empty = self.begin(inner)
                return first, is_empty or suffix[0] in "*?" or suffix.startswith("{0")
            case _Group(alternatives):
                starts = [self._start(items) for items in alternatives]
                chars = functools.reduce(operator.or_, (first for first, _ in starts))
                return chars, any(is_empty for _, is_empty in starts)
        return 0, False

    def _start(self, items: Sequence[_Item]) -> tuple[int, bool]:
        chars = 0
        for item in items:
            first, is_empty = self.begin(item)
            chars |= first
            if not is_empty:
                return chars, False
        return chars, True

    def each(self, items: Sequence[_Item], after: int) -> list[tuple[_Item, int]]:
        """Give the items of a sequence, each with the characters that can follow it."""
        found = []
        for item in reversed(items):
            found.append((item, after))
            first, is_empty = self.begin(item)
            after = first | (after if is_empty else 0)
        return found[::-1]

    def of(self, rule: str) -> int:
        """The characters that can follow a rule."""
        return self._after[rule]

    def inside(self, item: _Repeat, after: int) -> int:
        """The characters that can follow what is repeated."""
        return after if item.suffix == "?" else after | self.begin(item.item)[0]

    def _followed(self, item: _Item, after: int) -> Iterator[tuple[str, int]]:
        match item:
            case _Ref(name):
                yield name, after
            case _Repeat(inner):
                yield from self._followed(inner, self.inside(item, after))
            case _Group(alternatives):
                for items in alternatives:
                    for one, chars in self.each(items, after):
                        yield from self._followed(one, chars)


class _Writer:
    """Writes the rules down in Lark: terminals have names in capitals."""

    def __init__(self, rules: dict[str, _Group]) -> None:
        self._rules = rules
        self._terminals = _terminals(rules)
        self._names = {
            name: f"{'T' if name in self._terminals else 'r'}{i}" for i, name in enumerate(rules)
        }
        self._follow = _Follow({} if len(self._terminals) == len(rules) else rules)
        self._n_spliced = 0
        self._lines: list[str] = []
        self._n_lexemes = 0

    def lark(self) -> str:
        for name, group in self._rules.items():
            if name in self._terminals:
                body = self._lexeme(group)
            else:
                body = self._rule(group, self._follow.of(name))
            self._lines.append(f"{self._names[name]}: {body}")
        return "\n".join([f"start: {self._names['root']}", *self._lines, ""])

    def _lexeme(self, item: _Item) -> str:
        """Write a part of a lexeme."""
        match item:
            case _Text(lark) | _Token(lark):
                return lark
            case _Ref(name):
                return self._names[name]
            case _Repeat(inner, suffix):
                return _repeated(self._lexeme(inner), inner, suffix)
            case _Group(alternatives):
                return f"({' | '.join(self._sequence(items) for items in alternatives)})"

    def _sequence(self, items: Sequence[_Item]) -> str:
        return " ".join(map(self._lexeme, items)) or '""'

    def _rule(self, item: _Item, after: int) -> str:
        """Write a part of a recursive rule, which some characters can follow."""
        match item:
            case _Repeat(inner, suffix):
                return _repeated(self._rule(inner, self._follow.inside(item, after)), inner, suffix)
            case _Group(alternatives):
                ways = (" ".join(self._parts(items, after)) or '""' for items in alternatives)
                return f"({' | '.join(ways)})"
        return self._lexeme(item)

    def _parts(self, items: Sequence[_Item], after: int) -> Iterator[str]:
        """Write a sequence of a recursive rule: adjacent items that are text become one lexeme."""
        run: list[_Item] = []
        last = 0
        for item, chars in self._follow.each(items, after):
            if self._is_text(item):
                run.append(item)
                last = chars
                continue
            yield from self._run(run, last)
            run = []
            yield self._rule(item, chars)
        yield from self._run(run, last)

    def _run(self, run: list[_Item], after: int) -> Iterator[str]:
        if not run:
            return
        ended = self._ended(run, after)
        if len(run) == 1 and isinstance(run[0], _Text | _Ref) and not ended:
            yield self._lexeme(run[0])
        else:
            yield self._named(ended or self._sequence(run))

    def _ended(self, run: Sequence[_Item], after: int) -> str:
        """Write a lexeme that ends where what is behind it begins; empty if any does.

        Each free text in it is one in which the rest of the lexeme, with the beginning of what
        follows, does not occur.
        """
        items = self._spliced(run)
        written = list(map(self._lexeme, items))
        ends = 0
        for i, item in enumerate(items):
            chars, is_any = _free(item)
            rest = items[i + 1 :]
            if chars & after and (is_any or rest) and self._is_within(rest, chars):
                marker = f"{self._named(self._sequence(rest))} " if rest else ""
                end = f"/(?s:.)*/ {marker}/[{_in_class(after)}](?s:.)*/"
                written[i] = self._named(f"{written[i]} & ~({end})")
                ends += 1
        return " ".join(written) if ends else ""

    def _spliced(self, items: Sequence[_Item]) -> list[_Item]:
        """Put what groups and rules of one sequence hold in their places."""
        found: list[_Item] = []
        for item in items:
            self._n_spliced += 1
            inner = self._rules[item.name] if isinstance(item, _Ref) else item
            is_one = isinstance(inner, _Group) and len(inner.alternatives) == 1
            if is_one and self._n_spliced < _MAX_SPLICED:
                assert isinstance(inner, _Group)
                found += self._spliced(inner.alternatives[0])
            else:
                found.append(item)
        return found

    def _is_within(self, items: Sequence[_Item], chars: int) -> bool:
        for leaf in itertools.chain.from_iterable(map(_leaves, items)):
            self._n_spliced += 1
            if self._n_spliced >= _MAX_SPLICED:
                return False
            if isinstance(leaf, _Ref) and not self._is_within([self._rules[leaf.name]], chars):
                return False
            if isinstance(leaf, _Text) and not all(place & chars for place in leaf.chars):
                return False
        return True

    def _named(self, body: str) -> str:
        self._n_lexemes += 1
        self._lines.append(f"L{self._n_lexemes}: {body}")
        return f"L{self._n_lexemes}"

    def _is_text(self, item: _Item) -> bool:
        return not _has_token(item) and all(
            reference.name in self._terminals for reference in _references(item)
        )


def _repeated(written: str, inner: _Item, suffix: str) -> str:
    # Two signs in a row would be read as one: "a"*? does not mean ("a"*)?.
    return f"({written}){suffix}" if isinstance(inner, _Repeat) else f"{written}{suffix}"


def _free(item: _Item) -> tuple[int, bool]:
    """The characters of a text of any length, and whether it is free; none: it is no such text."""
    match item:
        case _Repeat(_Text(_, (chars,), is_any), suffix) if suffix in "*+" or ",}" in suffix:
            return chars, is_any
    return 0, False


def _in_class(chars: int) -> str:
    """Write a set of characters as a class has them."""
    each = "".join(rf"\x{{{code:x}}}" for code in range(128) if chars >> code & 1)
    return each + (r"\x{80}-\x{10ffff}" if chars & _OTHERS else "")


def _terminals(rules: dict[str, _Group]) -> frozenset[str]:
    """Find the rules that can be one regular expression: without recursion and tokens.

    A rule is looked at when all rules that it refers to have been found, so the work is linear.
    """
    targets = {name: {ref.name for ref in _references(rule)} for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, names in targets.items():
        for target in names:
            users[target].append(name)
    missing = {name: len(names) for name, names in targets.items()}
    ready = [n for n, count in missing.items() if not count and not _has_token(rules[n])]
    found = set(ready)
    while ready:
        for user in users[ready.pop()]:
            missing[user] -= 1
            if not missing[user] and not _has_token(rules[user]):
                found.add(user)
                ready.append(user)
    return frozenset(found)
