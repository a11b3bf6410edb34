"""The pieces that the descriptions of formats are made of.

A call is described as the steps to read it, in order. Whitespace before a step is skipped.
`trioserve.chat.parse.reader` carries the steps out. The last class, `ChatFormat`, is the whole
description of one family.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

import attrs


@attrs.frozen
class Marker:
    """A text that must follow."""

    text: str


@attrs.frozen
class Maybe:
    """One of these texts, or none; those that begin with another one come before it."""

    texts: tuple[str, ...]


@attrs.frozen
class OneOf:
    """Exactly one of these texts."""

    texts: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Ignore:
    """Text that clients do not need, such as an id, until one of these texts."""

    until: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Name:
    """The name of the function, until one of these texts, which stay for the next step.

    `prefix` is no part of the name, and neither is a counter such as ``:0`` if `counted`.
    """

    until: tuple[str, ...]
    prefix: str = ""
    counted: bool = False


@attrs.frozen
class QuotedName:
    """The name of the function as a JSON string."""


@attrs.frozen
class JsonArguments:
    """The arguments as a JSON object; empty if none follows."""


@attrs.frozen(kw_only=True)
class JsonCall:
    """Name and arguments in one JSON object, such as ``{"name": "f", "arguments": {…}}``.

    Members that are in none of the fields make it no call.
    """

    name_keys: tuple[str, ...] = ("name",)
    arguments_keys: tuple[str, ...] = ("arguments",)
    ignored_keys: tuple[str, ...] = ()  # members that clients do not need


@attrs.frozen(kw_only=True)
class Parameters:
    """Arguments that stand one by one between markers; text is written as it is.

    A value is over where `close` comes and then `open` or one of `ends`, so that it may hold its
    own markers; what must be JSON is not over within a string. What is not said to be text, by the
    tool's schema or by `text_attribute`, is JSON where it reads as JSON other than a string.
    """

    open: str
    key_end: str
    close: str
    ends: tuple[str, ...]
    value_open: str = ""  # attributes and whitespace may stand between the key and this
    text_attribute: str = ""  # the attribute of a parameter that is text
    cdata: bool = False  # a value may stand in ``<![CDATA[`` and ``]]>``, and is text then
    newlines: bool = False  # a newline on either side of the value is no part of it
    is_json: bool = False  # text is JSON, too


@attrs.frozen(kw_only=True)
class Literals:
    """Arguments as ``(a="x", b=[1, True])`` in Python, or alike.

    Every kind of value is written as in Python or JSON, but for strings and keys.
    """

    open: str
    equals: str
    close: str
    quotes: tuple[str, ...] = ('"', "'")
    escapes: bool = True  # a backslash in a string begins an escape


Step: TypeAlias = (
    "Marker | Maybe | OneOf | Ignore | Name | QuotedName | JsonArguments | JsonCall | Parameters"
    " | Literals | Elements | JsonContent | Choice"
)


@attrs.frozen(kw_only=True)
class Elements:
    """Arguments as elements of XML, one in another, up to the end of the `parent` around them.

    `mark` stands before each tag. Children called `item` make a list, any others an object.
    """

    mark: str
    parent: str
    item: str


@attrs.frozen
class JsonContent:
    """A JSON string that holds content: the message has no call after all. No step follows it."""


@attrs.frozen
class Choice:
    """The first steps are for input that begins with a text, the others for other input.

    A grammar has the first, or the others if `writes_others`.
    """

    start: str
    steps: tuple[Step, ...]
    otherwise: tuple[Step, ...]
    writes_others: bool = False


def texts_in(description: object) -> Iterator[str]:
    """Give all texts in a description."""
    if isinstance(description, str):
        yield description
    elif isinstance(description, tuple):
        for part in description:
            yield from texts_in(part)
    elif attrs.has(kind := type(description)):
        for field in attrs.fields(kind):
            yield from texts_in(getattr(description, field.name))


def described(description: object) -> str:
    """Write a description, without what is as usual."""
    if isinstance(description, tuple):
        return f"({', '.join(map(described, description))})"
    if not attrs.has(kind := type(description)):
        return repr(description)
    fields = ((field, getattr(description, field.name)) for field in attrs.fields(kind))
    given = (f"{field.name}={described(one)}" for field, one in fields if one != field.default)
    return f"{kind.__name__}({', '.join(given)})"


@attrs.frozen(kw_only=True)
class ToolCalls:
    """The places of calls in a message, and their notation.

    One of `starts` begins a group of calls; `opening` is read before the first. After each call
    another one follows if one of `between` comes, which is dropped, or one of `again`, which is a
    part of that call; an empty one is any text that closes nothing. Then the texts in `closing` may
    come, in order; any may be missing.
    """

    starts: tuple[str, ...]
    call: tuple[Step, ...]
    opening: tuple[Step, ...] = ()
    between: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    bare: str = ""  # a message that begins with one of these characters begins with a call
    short_ids: bool = False  # the template takes ids only if they have nine letters and digits


@attrs.frozen
class Reasoning:
    """Reasoning comes first, between two markers. The first may be part of the prompt."""

    start: str
    end: str


@attrs.frozen(kw_only=True)
class Channels:
    """Output that is a row of messages, each of a header and a body.

    A header stands between `start` and `message`. Regular expressions say where the body goes: a
    header with `call`, whose first group is the name of the function, has a call; one with
    `reasoning` has that. With `content` too the header is dropped, but stays with any other.

    `thinking` are the texts around reasoning. One of each of `answer` comes, in this order, before
    what is content.
    """

    start: str
    message: str
    call: str
    content: str
    reasoning: str = ""
    ends: tuple[str, ...] = ()
    #: The headers of a call, with a place for the name, and of content; and the text before them.
    call_header: str
    content_header: str
    role: str = ""
    thinking: Reasoning | None = None
    answer: tuple[tuple[str, ...], ...] = ()
    body: tuple[Step, ...] = (JsonArguments(),)  # of a call
    between: str = ""  # what ends a call that another one follows; else a call is the last message


@attrs.frozen(kw_only=True)
class ChatFormat:
    """The notation of messages of a family of models.

    A template of this family has all texts in `mentions`, and none in `lacks`. With `channels`
    there is nothing else. The texts in `dropped` are markers around content.
    """

    mentions: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    reasoning: Reasoning | None = None
    tool_calls: ToolCalls | None = None
    dropped: tuple[str, ...] = ()
    channels: Channels | None = None
    #: The markers around reasoning, or None.
    thinking: Reasoning | None = attrs.field(init=False)

    @thinking.default
    def _find_thinking(self) -> Reasoning | None:
        return self.reasoning if self.channels is None else self.channels.thinking

    def fits(self, source: str) -> bool:
        return all(text in source for text in self.mentions) and not any(
            text in source for text in self.lacks
        )

    @property
    def texts(self) -> frozenset[str]:
        """All texts that the description mentions; most are markers.

        Many markers are control tokens, so the text of an output must contain their names.
        """
        parts = (self.reasoning, self.tool_calls, self.dropped, self.channels)
        return frozenset(filter(None, texts_in(parts)))


# -- markers in text


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Count the characters at the end of a text that may be the beginning of a marker."""
    beginning, longest = _patterns(markers)[1:]
    found = beginning.search(text, max(0, len(text) - longest))
    return 0 if found is None else len(text) - found.start()


def first_of(text: str, markers: tuple[str, ...], start: int = 0) -> tuple[int, str]:
    """Find the first of the markers in a text, from `start`: its place, or -1, and which it is."""
    found = _patterns(markers)[0].search(text, start)
    return (-1, "") if found is None else (found.start(), found[0])


@functools.lru_cache(maxsize=256)
def beginning_of(markers: tuple[str, ...]) -> Callable[..., re.Match[str] | None]:
    """Make a quick search for what a marker may begin with, or newlines before one at the end."""
    characters = "".join(sorted({marker[0] for marker in markers}))
    return re.compile(rf"[{re.escape(characters)}]|\n\Z" if markers else "(?!)").search


@functools.lru_cache(maxsize=256)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Patterns of a marker, and of a marker cut off at the end, and the length of the longest."""
    begun = {marker[:length] for marker in markers for length in range(1, len(marker))}
    whole = re.compile("|".join(map(re.escape, markers)) or "(?!)")
    beginning = re.compile(f"(?:{'|'.join(map(re.escape, begun)) or '(?!)'})\\Z")
    return whole, beginning, max(map(len, begun), default=0)
