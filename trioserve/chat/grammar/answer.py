"""Makes the grammar of an answer when tools are offered, from the format of the chat."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from trioserve.chat.formats.syntax import Channels, ChatFormat, Text, ToolCalls
from trioserve.chat.grammar.calls import Function, GroupWriter, functions_of
from trioserve.chat.grammar.lark import ANYTHING, Rules, choice, quoted, sequence
from trioserve.chat.grammar.schemas import Part, check_depth
from trioserve.chat.tool_choice import ToolChoice
from trioserve.errors import InvalidRequestError
from trioserve.types import Grammar

_CHANNEL_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
#: Newlines before the first marker of a message belong to the marker.
_NEWLINES = r"/\n{0,4}/"
#: Grammars are remembered that are made of no more characters than this.
_MAX_REMEMBERED = 2**17
_BLANKS = ("", " ", "\n")


def constrain(
    format: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    parallel: bool,
    prompt_tail: str = "",
    answer: Grammar | None = None,
    owner: str = "",
) -> Grammar | None:
    """Make the grammar that an answer has to follow after its reasoning; None if it is free.

    Args:
        format: how the model writes.
        tools: what it is offered, in OpenAI's form.
        choice: what it may do with them.
        parallel: whether an answer may have several calls.
        prompt_tail: the end of the prompt, which tells whether it has begun a message.
        answer: what an answer in words has to look like.
        owner: whose chat it is. What was made for one is not found by another, because that would
            be quicker, and tell.

    Raises:
        InvalidRequestError: the schema of a tool, or `answer`, cannot be enforced here.
    """
    if not tools or choice.mode == "none":
        return answer
    channels = format.channels
    opened = False
    if channels is not None and (begun := prompt_tail.rfind(channels.start)) >= 0:
        opened = channels.message not in prompt_tail[begun + len(channels.start) :]
    try:
        text = json.dumps(tools)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"'tools' are not JSON: {error}.", param="tools") from None
    size = len(text) + (0 if answer is None else len(answer.source))
    make = _made if size <= _MAX_REMEMBERED else _made.__wrapped__
    return make(owner, format, text, choice, parallel, opened, answer)


@lru_cache(maxsize=32)
def _made(
    _owner: str,
    format: ChatFormat,
    tools: str,
    choice: ToolChoice,
    parallel: bool,
    opened: bool,
    answer: Grammar | None,
) -> Grammar | None:
    """Make a grammar, or find it among the last ones: a chat has the same tools in each turn."""
    if answer is not None and answer.kind not in ("json_schema", "json_object"):
        raise InvalidRequestError(
            f"'{answer.param}' cannot be used together with 'tools'.", param=answer.param
        )
    functions = functions_of(json.loads(tools), choice)
    writer: _ChannelWriter | _MarkerWriter
    if format.channels is not None:
        writer = _ChannelWriter(format.channels, functions, parallel, opened)
    elif format.tool_calls is not None:
        writer = _MarkerWriter(format.tool_calls, functions, parallel)
    else:
        return answer
    if choice.mode == "required":
        return writer.calls()
    return writer.calls_or(answer) if answer is not None else writer.lazy()


def _schema_of(answer: Grammar) -> Any:
    if answer.kind == "json_object":
        return {"type": "object"}
    try:
        schema = json.loads(answer.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"'{answer.param}' cannot be used: it is not JSON: {error}.", param=answer.param
        ) from None
    check_depth(Part(schema, schema, answer.param))
    return schema


class _MarkerWriter:
    """Writes messages whose calls stand between markers."""

    def __init__(self, syntax: ToolCalls, functions: list[Function], parallel: bool) -> None:
        self._syntax = syntax
        self._parallel = parallel
        self._rules = Rules()
        self._groups = GroupWriter(self._rules, syntax, functions, parallel=parallel)

    def calls(self) -> Grammar:
        """Write an answer that is nothing but calls."""
        return self._grammar(self._rules.rule(_NEWLINES), self._groups.whole())

    def calls_or(self, answer: Grammar) -> Grammar:
        """Write an answer that is calls, or JSON."""
        rules = self._rules
        calls = sequence(rules.rule(_NEWLINES), self._groups.whole())
        said = sequence(rules.space, rules.schema(_schema_of(answer), answer.param))
        return self._grammar(choice([calls, said]))

    def lazy(self) -> Grammar | None:
        """Write an answer that is free until a call begins."""
        triggers, read = self._triggers()
        if self._syntax.bare and not self._parallel:
            # Without a marker, the first character tells.
            free = self._rules.terminal(rf"/[ \t\r\n]*[^{self._syntax.bare} \t\r\n](?s:.*)/")
            return self._grammar(choice([self._groups.whole(), free, '""']))
        if not triggers:
            return None
        return self._rules.grammar(self._groups.rest(read), triggers=(triggers,))

    def _grammar(self, *parts: str) -> Grammar:
        return self._rules.grammar(sequence(*parts), required=True)

    def _triggers(self) -> tuple[tuple[str, ...], int]:
        """Find the texts that show that a call begins, and how many steps they have read."""
        syntax = self._syntax
        first = syntax.call[0]
        if isinstance(first, Text) and first.text in syntax.starts and not syntax.opening:
            return (first.text,), 1  # all ways to begin lead there
        texts = [one.text for one in syntax.opening if isinstance(one, Text)]
        if len(texts) != len(syntax.opening) or not any(one[0].isalpha() for one in syntax.starts):
            return syntax.starts, 0
        # A word is no marker by itself: what follows it belongs to it, with or without blanks.
        found = []
        for start in syntax.starts:
            for blanks in itertools.product(_BLANKS, repeat=len(texts)):
                pairs = zip(blanks, texts, strict=True)
                found.append(start + "".join(blank + text for blank, text in pairs))
        return tuple(found), len(texts)


class _ChannelWriter:
    """Writes rows of messages, of which calls are some."""

    def __init__(
        self, channels: Channels, functions: list[Function], parallel: bool, opened: bool
    ) -> None:
        self._channels = channels
        self._functions = functions
        self._rules = Rules()
        # Where a message has an end of its own, a call is the last one.
        self._parallel = parallel and not channels.ends
        self._open = opened
        for function in functions:
            if not _CHANNEL_NAME.fullmatch(function.name) or function.name == "all":
                raise function.refuse_name()

    @property
    def _next(self) -> str:
        """The beginning of one more message."""
        channels = self._channels
        return self._rules.marker(channels.start + channels.role)

    def _first(self, message: str) -> str:
        """Write the first message; the prompt may have begun it."""
        begin = self._next
        return sequence(f"({begin})?" if self._open else begin, message)

    def _call(self, *, rest: bool = False) -> str:
        """Write calls: each header with the name, and then the arguments."""
        rules, channels = self._rules, self._channels
        before, after = channels.call_header.split("{}")
        calls = []
        for function in self._functions:
            arguments = rules.schema(function.arguments.whole, function.arguments.param)
            calls.append(
                sequence(
                    quoted(function.name),
                    f"({rules.marker(after)})?" if after else "",
                    rules.marker(channels.message),
                    rules.space,
                    arguments,
                )
            )
        call = rules.rule(choice(calls))
        return call if rest or not before else sequence(rules.marker(before), call)

    def _calls(self, first: str) -> str:
        more = f"({self._rules.space} {self._next} {self._call()})*" if self._parallel else ""
        return sequence(first, more)

    def calls(self) -> Grammar:
        """Write an answer that is nothing but calls."""
        return self._rules.grammar(self._calls(self._first(self._call())), required=True)

    def calls_or(self, answer: Grammar) -> Grammar:
        """Write an answer that is calls, or JSON."""
        rules, channels = self._rules, self._channels
        said = sequence(
            rules.marker(channels.content_header),
            rules.marker(channels.message),
            rules.space,
            rules.schema(_schema_of(answer), answer.param),
        )
        first = self._first(choice([self._calls(self._call()), said]))
        return rules.grammar(first, required=True)

    def lazy(self) -> Grammar:
        """Write an answer that is free until a call begins."""
        channels, rules = self._channels, self._rules
        before = channels.call_header.split("{}")[0]
        if before:
            return rules.grammar(self._calls(self._call(rest=True)), triggers=((before,),))
        # A header is nothing but a name, so that each message has to be looked at.
        start = channels.start
        content = rules.marker(channels.content_header + channels.message)
        calls = self._calls(self._call())
        last = rules.terminal(f"{ANYTHING} & ~/(?s:.*){re.escape(start)}(?s:.*)/")
        talk = choice([sequence(content, rules.text(ANYTHING, start), calls), f"{content} {last}"])
        body = choice([calls, talk])
        if self._open:
            return rules.grammar(body)
        return rules.grammar(body, triggers=((start,),))
