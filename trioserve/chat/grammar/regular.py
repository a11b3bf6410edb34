"""A Lark grammar as one regular expression, for texts that a tool takes.

A text in a call stands in the notation of the call, such as a JSON string. The grammars of calls
write a string with a ``pattern`` in each notation, so a Lark grammar becomes a pattern. A rule that
refers to itself at one end becomes a repetition. Rules that are nested in themselves are followed
as deep as the expression stays short: each text that it allows is one of the grammar's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

#: The longest expression, in characters.
MAX_CHARS = 4000

#: The longest grammar, in characters, and its rules. Within these, no work takes 0.1 seconds.
MAX_SOURCE = 2**14
_MAX_RULES = 256

#: The most references of nested rules that are followed into each other.
_MAX_DEPTH = 32

#: The terminals that ``%import common.…`` can name.
_COMMON: Mapping[str, str] = {
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": r"(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+\-]?(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)"
    r"(?:[eE][+\-]?[0-9]+)?)",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "SIGNED_NUMBER": r"[+\-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


class GrammarError(Exception):
    """A grammar cannot be read or enforced; the message is the problem: "has no rule 'start'"."""


# -- the nodes of a grammar


@attrs.frozen(cache_hash=True)
class _Text:
    """An expression: of a string or a terminal's ``/…/``."""

    pattern: str


@attrs.frozen(cache_hash=True)
class _Ref:
    name: str


@attrs.frozen(cache_hash=True)
class _Seq:
    parts: tuple[_Node, ...]


@attrs.frozen(cache_hash=True)
class _Alt:
    parts: tuple[_Node, ...]


@attrs.frozen(cache_hash=True)
class _Repeat:
    part: _Node
    count: str  # as it stands behind an expression


_Node: TypeAlias = "_Text | _Ref | _Seq | _Alt | _Repeat"

_NOTHING = _Seq(())

# -- reading


_TOKEN = re.compile(
    r"""
    (?P<blank>(?:[ \t\r\f]|//[^\n]*|\\\n)+)
  | (?P<line>\n)
  | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
  | (?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)
  | (?P<statement>%[a-z_]+)
  | (?P<name>[?!]?_*[a-zA-Z][a-zA-Z0-9_]*)
  | (?P<dots>\.\.)
  | (?P<arrow>->[ \t]*[a-zA-Z_][a-zA-Z0-9_]*)
  | (?P<count>\{[ ]*+[0-9]*+[ ]*+(?:,[ ]*+[0-9]*+[ ]*+)?\}|~[ ]*+[0-9]++(?:[ ]*+\.\.[ ]*+[0-9]+)?)
  | (?P<priority>\.-?[0-9]+)
  | (?P<sign>[:|()\[\]*+?,.])
    """,
    re.VERBOSE,
)


@attrs.define
class _Reader:
    """Reads the rules of a grammar, from its tokens."""

    tokens: list[tuple[str, str]]
    at: int = 0
    rules: dict[str, _Node] = attrs.field(factory=dict)
    ignored: list[_Node] = attrs.field(factory=list)

    def read(self) -> None:
        while self.at < len(self.tokens):
            kind, text = self._next()
            if kind == "line":
                continue
            if kind == "statement":
                self._statement(text)
            elif kind == "name":
                self._maybe("priority")
                self._expect(":")
                self.rules[text.lstrip("?!")] = self._choice()
                if len(self.rules) > _MAX_RULES:
                    raise GrammarError(f"has more than {_MAX_RULES} rules")
            else:
                raise GrammarError(f"has {text!r:.40} where a rule should begin")

    def _statement(self, text: str) -> None:
        if text == "%ignore":
            self.ignored.append(self._choice())
        elif text == "%import":
            self._import()
        else:
            raise GrammarError(f"has {text!r:.40}, which is not supported")

    def _import(self) -> None:
        words = []
        while self.at < len(self.tokens) and self._peek()[0] != "line":
            words.append(self._next()[1])
        named = re.fullmatch(r"common\.([A-Z_]+)(?:->\s*(\w+))?", "".join(words))
        listed = re.fullmatch(r"common\(([A-Z_,]+)\)", "".join(words))
        pairs = [(named[1], named[2] or named[1])] if named else []
        pairs += [(name, name) for name in listed[1].split(",")] if listed else []
        if not pairs:
            raise GrammarError("imports from something else than 'common'")
        for name, alias in pairs:
            if name not in _COMMON:
                raise GrammarError(f"imports {name!r:.40}, which 'common' does not have")
            self.rules[alias] = _Text(_COMMON[name])

    # -- expressions

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self._peek() == ("sign", "|"):
            self.at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Alt(_needed(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (atom := self._atom()) is not None:
            while (count := self._count()) is not None:
                atom = _Repeat(atom, count)
            parts.append(atom)
        self._maybe("arrow")
        return parts[0] if len(parts) == 1 else _Seq(tuple(parts))

    def _atom(self) -> _Node | None:
        kind, text = self._peek()
        if kind == "name":
            self.at += 1
            return _Ref(text.lstrip("?!"))
        if kind == "string":
            self.at += 1
            if self._maybe("dots"):
                return _Text(f"[{_escaped(text)}-{_escaped(self._next()[1])}]")
            pattern = as_pattern(_unquoted(text))
            return _Text(f"(?i:{pattern})" if text.endswith("i") else pattern)
        if kind == "regex":
            self.at += 1
            return _Text(_expression(text))
        if text == "(" or text == "[":
            self.at += 1
            inner = self._choice()
            self._expect(")" if text == "(" else "]")
            return inner if text == "(" else _Repeat(inner, "?")
        return None

    def _count(self) -> str | None:
        kind, text = self._peek()
        if kind == "sign" and text in "*+?":
            self.at += 1
            return text
        if kind != "count":
            return None
        self.at += 1
        numbers = re.sub(r"[{}~ ]", "", text).replace("..", ",")
        return f"{{{'0' if numbers.startswith(',') else ''}{numbers}}}"

    # -- tokens

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("line", "")

    def _next(self) -> tuple[str, str]:
        found = self._peek()
        self.at += 1
        return found

    def _maybe(self, kind: str) -> bool:
        found = self.at < len(self.tokens) and self.tokens[self.at][0] == kind
        self.at += found
        return found

    def _expect(self, sign: str) -> None:
        kind, text = self._next()
        if (kind, text) != ("sign", sign):
            raise GrammarError(f"needs {sign!r} where it has {text!r:.40}")


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """Split a grammar. A line ends a rule, unless it is in brackets or a bar begins the next."""
    at = depth = 0
    is_ended = False
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise GrammarError(f"cannot be read at {source[at : at + 20]!r}")
        kind, text, at = str(match.lastgroup), match[0], match.end()
        if kind == "line":
            is_ended = not depth
        elif kind != "blank":
            if is_ended and text != "|":
                yield "line", "\n"
            is_ended = False
            depth += (text in ("(", "[")) - (text in (")", "]"))
            yield kind, text


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "\\": "\\", '"': '"', "/": "/"}


def _unquoted(text: str) -> str:
    inner = text.removesuffix("i")[1:-1]

    def read(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1][1:], 16))
        return _ESCAPES.get(match[2], match[2])

    return re.sub(r"\\(?:(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})|(.))", read, inner)


def _escaped(text: str) -> str:
    character = _unquoted(text)
    if len(character) != 1:
        raise GrammarError(f"has a range of {text!r:.40}, which is not one character")
    return as_pattern(character)


def as_pattern(text: str) -> str:
    """Write a text as an expression in the syntax that Python, Rust and Lark share."""
    text = re.sub(r"[\\.^$|?*+()\[\]{}/&~#\-]", r"\\\g<0>", text)
    return text.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _expression(text: str) -> str:
    """Read ``/…/`` with its flags."""
    _, inner, flags = text[0], *text[1:].rsplit("/", 1)
    pattern = inner.replace("\\/", "/")
    kept = "".join(flag for flag in "ims" if flag in flags)
    pattern = f"(?{kept}:{pattern})" if kept else f"(?:{pattern})"
    check_expression(pattern)
    return pattern


def check_expression(pattern: str) -> None:
    """Check that an expression can be followed forwards.

    Raises:
        GrammarError: it is invalid, or looks around, or has anchors.
    """
    try:
        parse_expression(re.sub(r"\\[pP](?:\{\^?\w+\}|\w)", "a", pattern))  # Python has no such
    except (re.error, RecursionError, OverflowError) as error:
        raise GrammarError(f"has an invalid regular expression: {error}") from None
    bare = re.sub(rf"\\[^bBAzZ1-9]|{CLASS}", "", pattern, flags=re.DOTALL)
    if re.search(r"\(\?(?:[=!<(]|P[=<])|\\[1-9bBAzZ]|[$^]", bare):
        raise GrammarError("has a regular expression with anchors, or one that looks around")


#: A class of characters in an expression. One without an end, as in a comment, takes all that is
#: left: to look for the end again at each bracket would take the square of the length.
CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\Z)"


def parse_expression(pattern: str) -> None:
    """Check the syntax of an expression.

    Raises:
        re.error, RecursionError, OverflowError: it is invalid.
    """
    # Python makes a table of 65,536 entries for each class that has other characters than these.
    re.compile(_NOT_LATIN.sub(_in_latin, pattern))


_NOT_LATIN = re.compile(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\.|[^\0-\xff]", re.DOTALL)


def _in_latin(found: re.Match[str]) -> str:
    if found[0][0] == "\\" and not found.lastindex:
        return found[0]
    code = int(found[found.lastindex], 16) if found.lastindex else ord(found[0])
    return rf"\x{min(code, 255):02x}"


# -- writing


class _TooLong(Exception):  # noqa: N818 - it ends an attempt, and is not an error
    """The expression has become longer than it may be."""


class _Writer:
    """Writes rules as one expression."""

    def __init__(self, rules: Mapping[str, _Node], ignored: str) -> None:
        self._rules, self._ignored = rules, ignored
        inner = {name: set(_names_in(body)) for name, body in rules.items()}
        self.nested = {name for name in rules if name in _reached(name, inner)}
        self._known: dict[tuple[str, int], str | None] = {}

    def rule(self, name: str, depth: int) -> str | None:
        """Write a rule; None: no text follows it within the depth."""
        if name not in self._rules:
            raise GrammarError(f"has no rule {name!r:.40}")
        depth -= name in self.nested
        if depth < 0:
            return None
        key = (name, depth)
        if key not in self._known:
            is_terminal = name.lstrip("_")[:1].isupper()
            written = self.write(self._rules[name], depth, "" if is_terminal else self._ignored)
            if is_terminal and written is not None:
                written = _spaced(written, self._ignored)
            self._known[key] = written
        return self._known[key]

    def write(self, node: _Node, depth: int, gap: str) -> str | None:
        """Write a part of a rule; `gap` is what is ignored after each text in it."""
        match node:
            case _Text(pattern):
                written: str | None = _spaced(pattern, gap)
            case _Ref(name):
                written = self.rule(name, depth)
            case _Seq(parts):
                each = [self.write(part, depth, gap) for part in parts]
                known = [one for one in each if one is not None]
                written = "".join(known) if len(known) == len(each) else None
            case _Alt(parts):
                ways = [self.write(part, depth, gap) for part in parts]
                found = list(dict.fromkeys(way for way in ways if way is not None))
                written = f"(?:{'|'.join(found)})" if found else None
            case _Repeat(part, count):
                inner = self.write(part, depth, gap)
                if inner is None:
                    written = "" if count in "*?" or count.startswith("{0") else None
                else:
                    written = f"(?:{inner}){count}"
        if written is not None and len(written) > MAX_CHARS:
            raise _TooLong
        return written


def _needed(ways: Sequence[_Node]) -> tuple[_Node, ...]:
    """Leave out what another way allows as well: ``a`` beside ``a ("," a)*``."""
    parts = [way.parts if isinstance(way, _Seq) else (way,) for way in ways]
    lengths = {len(own) for own in parts}
    allowed = set()  # also by a longer way
    for own in parts:
        n = len(own)
        while n and isinstance(last := own[n - 1], _Repeat) and last.count in ("*", "?"):
            n -= 1
            if n in lengths:
                allowed.add(own[:n])
    return tuple(way for way, own in zip(ways, parts, strict=True) if own not in allowed)


def _spaced(pattern: str, gap: str) -> str:
    return f"(?:{pattern}){gap}" if gap else pattern


def _reached(name: str, inner: Mapping[str, set[str]]) -> set[str]:
    """The rules that a rule leads to."""
    found: set[str] = set()
    left = [name]
    while left:
        new = inner.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def _names_in(node: _Node) -> Iterator[str]:
    match node:
        case _Ref(name):
            yield name
        case _Seq(parts) | _Alt(parts):
            for part in parts:
                yield from _names_in(part)
        case _Repeat(part):
            yield from _names_in(part)


def _flattened(name: str, body: _Node) -> _Node:
    """Make a repetition of a rule that refers to itself at one end only: ``a: a "," b | b``."""
    ways = body.parts if isinstance(body, _Alt) else (body,)
    begins, ends, others = [], [], []
    for way in ways:
        parts = way.parts if isinstance(way, _Seq) else (way,)
        if name not in _names_in(way):
            others.append(way)
        elif parts[0] == _Ref(name) and name not in _names_in(_Seq(parts[1:])):
            begins.append(_Seq(parts[1:]))
        elif parts[-1] == _Ref(name) and name not in _names_in(_Seq(parts[:-1])):
            ends.append(_Seq(parts[:-1]))
        else:
            return body
    if not others or bool(begins) == bool(ends):
        return body
    more = _Repeat(_Alt(tuple(begins or ends)), "*")
    once = _Alt(tuple(others))
    return _Seq((once, more) if begins else (more, once))


def expression_of(source: str) -> str:
    """Write a Lark grammar as a regular expression, without anchors.

    Raises:
        GrammarError: it cannot be read, or is too long for an expression.
    """
    if len(source) > MAX_SOURCE:
        raise GrammarError(f"is longer than {MAX_SOURCE} characters")
    try:
        reader = _Reader(list(_tokens(source)))
        reader.read()
        rules = {name: _flattened(name, body) for name, body in reader.rules.items()}
        if "start" not in rules:
            raise GrammarError("has no rule 'start'")
        return _deepest(rules, reader.ignored)
    except RecursionError:
        raise GrammarError("is nested too deeply") from None


def _deepest(rules: Mapping[str, _Node], ignored: Sequence[_Node]) -> str:
    """Follow nested rules as deep as the expression stays short."""
    unread = _Writer(rules, "").write(_Alt(tuple(ignored)), 1, "") if ignored else None
    gap = f"(?:{unread})*" if unread else ""
    writer = _Writer(rules, gap)
    found = None
    for depth in range(1, _MAX_DEPTH + 1 if writer.nested else 2):
        try:
            written = writer.rule("start", depth)
        except _TooLong:
            break
        found = written or found
    if found is None:
        raise GrammarError(f"is longer than {MAX_CHARS} characters as a regular expression")
    return f"{gap}{found}" if gap else found


def pattern_of(syntax: str, definition: str) -> str:
    """Make the pattern of a string that follows a grammar: "lark", or "regex".

    Raises:
        GrammarError: it cannot be enforced.
    """
    if syntax == "lark":
        return f"^(?:{expression_of(definition)})$"
    if len(definition) > MAX_CHARS:
        raise GrammarError(f"is longer than {MAX_CHARS} characters")
    check_expression(definition)
    return f"^(?:{definition})$"
