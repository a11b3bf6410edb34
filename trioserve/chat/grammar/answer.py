"""The grammar of an answer: what comes after its reasoning, and how it calls the tools on offer."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, assert_never

import attrs

from trioserve.chat.formats.syntax import (
    Channels,
    ChatFormat,
    Choice,
    Elements,
    Ignore,
    JsonArguments,
    JsonCall,
    JsonContent,
    Literals,
    Marker,
    Maybe,
    Name,
    OneOf,
    Parameters,
    QuotedName,
    Step,
    ToolCalls,
    texts_in,
)
from trioserve.chat.grammar.arguments import ArgumentsStep, dump_step
from trioserve.chat.grammar.schemas import (
    ANYTHING,
    ARGUMENTS,
    MAX_DEPTH,
    NAME,
    Part,
    Rules,
    choice,
    is_too_deep,
    quoted,
    sequence,
)
from trioserve.chat.params import ToolChoice, name_of
from trioserve.errors import InvalidRequestError
from trioserve.types import Grammar, Thinking


def after_thinking(
    grammar: Grammar, format: ChatFormat, thinking: Thinking | None, reasoning_format: str
) -> Grammar:
    """Begin a grammar for the answer after the reasoning.

    Where the model writes channels it begins in that of the answer, and a grammar for tool calls
    knows of channels itself. With the reasoning format "none" all of the output is content: then
    there is only reasoning that the prompt has begun.
    """
    if format.channels is not None and grammar.kind != "tools":
        if grammar.triggers or not format.channels.answer:
            return grammar
        return attrs.evolve(grammar, triggers=format.channels.answer, required=True)
    if thinking is None or any(thinking.end in texts for texts in grammar.triggers):
        return grammar
    if reasoning_format == "none" and not thinking.begun and not grammar.triggers:
        return grammar
    return attrs.evolve(grammar, thinking=thinking)


_WRITABLE_NAME = re.compile(r"[^\s<>{}()\[\]\"'`]{1,200}")
_COUNTED_NAME = re.compile(r".*:[0-9]+", re.DOTALL)
_NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@attrs.frozen
class Function:
    """A function that may be called, and the path of its tool in the request.

    The schema of one that is not `strict` is relaxed where no grammar can enforce it.
    """

    name: str
    schema: Mapping[str, Any]
    path: str
    strict: bool

    def refuse_name(self) -> InvalidRequestError:
        """Make the error for a name that the model's notation cannot write."""
        param = f"{self.path}.name"
        return InvalidRequestError.at(
            param, f"is {self.name!r:.100}, which this model cannot write."
        )

    def described(self, written: str) -> dict[str, Any]:
        """Describe it for the compiler; `written` is how the model writes its name."""
        return {
            "name": self.name,
            "written": written,
            "schema": self.schema,
            "param": f"{self.path}.parameters",
            "strict": self.strict,
        }


def functions_of(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[Function]:
    """Read the functions that a choice allows.

    Raises:
        InvalidRequestError: the schema of one is not an object.
    """
    found = []
    for i, tool in enumerate(tools):
        name = name_of(tool)
        if choice.names is not None and name not in choice.names:
            continue
        path = f"tools[{i}].function"
        function = tool.get("function", tool)
        schema = function.get("parameters")
        schema = _NO_ARGUMENTS if schema is None else schema
        if not isinstance(schema, Mapping):
            raise Part(schema, None, f"{path}.parameters").refuse("it must be an object")
        found.append(Function(name, schema, path, function.get("strict") is True))
    return found


def _written(step: Name | QuotedName | JsonCall, function: Function) -> str:
    """Write the name of a function. Raises InvalidRequestError: the notation cannot."""
    name = function.name
    if not isinstance(step, Name):
        if not name:
            raise function.refuse_name()
        return json.dumps(name, ensure_ascii=False)
    if not _WRITABLE_NAME.fullmatch(name) or (step.counted and _COUNTED_NAME.fullmatch(name)):
        raise function.refuse_name()
    return step.prefix + name


def _arguments_in(steps: Sequence[Step]) -> ArgumentsStep:
    """Find the step that reads the arguments."""
    for step in steps:
        if isinstance(step, JsonCall):
            return JsonArguments()
        if isinstance(step, JsonArguments | Parameters | Literals | Elements):
            return step
    raise AssertionError("a call has arguments")


def _texts_before(syntax: ToolCalls, steps: Sequence[Step]) -> list[str]:
    """Find the texts that may stand before a name; none if it is known by its quotes or prefix."""
    if isinstance(steps[0], Name):
        opening = [text for step in _chosen(syntax.opening) for text in texts_in(step)]
        return [*syntax.starts, *opening, *syntax.between, *(one or "\n" for one in syntax.again)]
    for before, step in itertools.pairwise(steps):
        if isinstance(step, Name) and not step.prefix and isinstance(before, Marker):
            return [before.text]
    return []


_CHANNEL_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
#: Newlines before the first marker of a message belong to the marker.
_NEWLINES = r"/\n{0,4}/"
#: Grammars made of at most this many characters are cached: many that are small, few others.
_MAX_SMALL, _MAX_LARGE = 2**17, 2**21
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
        format: of the model.
        tools: the tools on offer, in OpenAI's form.
        choice: of tools.
        parallel: an answer may have several calls.
        prompt_tail: the end of the prompt, which may have begun a message.
        answer: the format of an answer in text.
        owner: of the chat. Another owner does not find its grammars in the cache, since the time
            would tell that they are there.

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
        raise InvalidRequestError.at("tools", f"are not JSON: {error}.") from None
    size = len(text) + (0 if answer is None else len(answer.source))
    make = _made if size <= _MAX_SMALL else _made_large if size <= _MAX_LARGE else _make
    return make(owner, format, text, choice, parallel, opened, answer)


def _make(
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
        raise InvalidRequestError.at(answer.param, "cannot be used together with 'tools'.")
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


_made = lru_cache(maxsize=32)(_make)
_made_large = lru_cache(maxsize=4)(_make)


def _schema_of(answer: Grammar) -> Any:
    if answer.kind == "json_object":
        return {"type": "object"}
    try:
        schema = json.loads(answer.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError.at(
            answer.param, f"cannot be used: it is not JSON: {error}."
        ) from None
    if is_too_deep(schema):
        problem = f"it is nested more than {MAX_DEPTH} deep"
        raise Part(schema, schema, answer.param).refuse(problem)
    return schema


#: An id, and what may stand around it: ``" index="1``.
_ID = r"/[A-Za-z0-9_ \"=.:\-]{0,64}/"
#: The value of a member that clients do not need.
_IGNORED = r"/\"[A-Za-z0-9_\-]{0,64}\"|0|[1-9][0-9]{0,8}/"


def _chosen(steps: Sequence[Step]) -> list[Step]:
    """Take those steps of each choice that a grammar has."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Choice):
            found += _chosen(step.otherwise if step.writes_others else step.steps)
        else:
            found.append(step)
    return found


class _Writer:
    """Writes calls as rules.

    Args:
        arguments: the step that reads the arguments.
        functions: each with its name as it is written.
        before: a name stands after one of these texts; without them, after any text.
    """

    def __init__(
        self,
        arguments: ArgumentsStep,
        functions: Sequence[tuple[Function, str]],
        before: Sequence[str],
    ) -> None:
        self._rules = Rules()
        self._source = {
            "arguments": dump_step(arguments),
            "functions": [function.described(written) for function, written in functions],
            "before": list(before),
        }

    def _grammar(self, start: str, **fields: Any) -> Grammar:
        source = json.dumps({**self._rules.parts(start), **self._source}, ensure_ascii=False)
        return Grammar("tools", source, param="tools", **fields)

    def _steps(self, steps: Sequence[Step]) -> Iterator[str]:
        before: Step | None = None
        for step in steps:
            joined = isinstance(step, Marker) and isinstance(before, Name | Ignore)
            if not joined and not isinstance(step, Name | Ignore | Literals):
                yield self._rules.space
            yield self._step(step, before)
            before = step

    def _step(self, step: Step, before: Step | None) -> str:
        rules = self._rules
        match step:
            case Marker(text):
                return rules.marker(text)
            case OneOf(texts) | Maybe(texts):
                return choice(rules.marker(text) for text in texts)
            case Ignore():
                return self._ignored(step, before)
            case Name():
                return self._name(step)
            case QuotedName():
                return NAME
            case JsonCall():
                return self._json_call(step)
            case JsonArguments() | Parameters() | Literals() | Elements():
                return ARGUMENTS
            case JsonContent() | Choice():
                raise AssertionError("these steps are no part of a call")
        assert_never(step)

    def _name(self, step: Name) -> str:
        counter = self._rules.rule("/:[0-9]{1,3}/") if step.counted else ""
        blanks = [text for text in step.until if not text.strip()]
        end = choice(map(quoted, blanks)) if blanks else ""
        return sequence(NAME, counter, end)

    def _ignored(self, step: Ignore, before: Step | None) -> str:
        """Write text that is ignored. After a name it begins with the end of the name."""
        free = self._rules.rule(_ID)
        if not isinstance(before, Name):
            return free
        ways = [
            "" if text in step.until else sequence(self._rules.marker(text), free)
            for text in before.until
        ]
        written = choice(way for way in ways if way)
        return f"({written})?" if "" in ways else written

    def _json_call(self, step: JsonCall) -> str:
        """Write a call as an object, with members that say nothing before or after the others."""
        rules, space = self._rules, self._rules.space
        colon = rules.rule(f'{space} ":" {space}')
        comma = rules.rule(f'{space} "," {space}')
        name = sequence(choice(quoted(f'"{key}"') for key in step.name_keys), colon, NAME)
        keys = choice(quoted(f'"{key}"') for key in step.arguments_keys)
        pair = rules.calls(sequence(name, comma, keys, colon, ARGUMENTS))
        ways = []
        for places in itertools.product("-<>", repeat=len(step.ignored_keys)):
            members = dict.fromkeys("<>", "")
            for key, place in zip(step.ignored_keys, places, strict=True):
                member = sequence(quoted(f'"{key}"'), colon, rules.rule(_IGNORED))
                if place == "<":
                    members["<"] = sequence(members["<"], member, comma)
                elif place == ">":
                    members[">"] = sequence(members[">"], comma, member)
            ways.append(sequence(members["<"], pair, members[">"]))
        return sequence('"{"', space, choice(ways), space, '"}"')


class _MarkerWriter(_Writer):
    """Writes messages whose calls stand between markers, in groups."""

    def __init__(self, syntax: ToolCalls, functions: list[Function], parallel: bool) -> None:
        steps = _chosen(syntax.call)
        named = next(one for one in steps if isinstance(one, Name | QuotedName | JsonCall))
        written = [(function, _written(named, function)) for function in functions]
        super().__init__(_arguments_in(steps), written, _texts_before(syntax, steps))
        self._syntax = syntax
        self._parallel = parallel
        self._call = self._any_call(syntax.call)

    def calls(self) -> Grammar:
        """Write an answer that is nothing but calls."""
        return self._grammar(sequence(self._rules.rule(_NEWLINES), self._whole()), required=True)

    def calls_or(self, answer: Grammar) -> Grammar:
        """Write an answer that is calls, or JSON."""
        rules = self._rules
        calls = sequence(rules.rule(_NEWLINES), self._whole())
        said = sequence(rules.space, rules.schema(_schema_of(answer), answer.param))
        return self._grammar(choice([calls, said]), required=True)

    def lazy(self) -> Grammar | None:
        """Write an answer that is free until a call begins."""
        triggers, read = self._triggers()
        if self._syntax.bare and not self._parallel:
            # Without a marker, the first character decides.
            free = self._rules.terminal(
                rf"/[ \t\r\n]*[^{re.escape(self._syntax.bare)} \t\r\n](?s:.*)/"
            )
            return self._grammar(choice([self._whole(), free, '""']), required=True)
        if not triggers:
            return None
        return self._grammar(self._rest(read), triggers=(triggers,))

    def _triggers(self) -> tuple[tuple[str, ...], int]:
        """Find the texts that show that a call begins, and how many steps they have read."""
        syntax = self._syntax
        first = _chosen(syntax.call)[0]
        if isinstance(first, Marker) and first.text in syntax.starts and not syntax.opening:
            return (first.text,), 1  # all ways to begin lead there
        texts = [one.text for one in syntax.opening if isinstance(one, Marker)]
        if len(texts) != len(syntax.opening) or not any(one[0].isalpha() for one in syntax.starts):
            return syntax.starts, 0
        # A word is no marker by itself: what follows it belongs to it, with or without blanks.
        found = []
        for start in syntax.starts:
            for blanks in itertools.product(_BLANKS, repeat=len(texts)):
                pairs = zip(blanks, texts, strict=True)
                found.append(start + "".join(blank + text for blank, text in pairs))
        return tuple(found), len(texts)

    # -- groups of calls

    def _whole(self) -> str:
        """Write all that a message has from its first call on."""
        group = self._group()
        if not self._parallel or self._syntax.bare:
            return group
        return sequence(group, f"({self._rules.space} {group})*")

    def _rest(self, read: int) -> str:
        """Write the part after the text that begins a call, which had `read` steps in it."""
        syntax = self._syntax
        # If it was a part of the call, the text before it, which closes with it, is not known.
        in_call = read > 0 and not syntax.opening
        opening = "" if in_call else self._opening(syntax.opening[read:])
        first = self._any_call(_chosen(syntax.call)[read:]) if in_call else self._call
        closing = self._closing()
        closing = f"({closing})?" if in_call and closing else closing
        rest = sequence(opening, first, self._more(), closing)
        if not self._parallel or not self._heads:
            return rest
        return sequence(rest, f"({self._rules.space} {self._group(headed=True)})*")

    @property
    def _heads(self) -> list[str]:
        """The markers that begin a group, without those that are a part of a call."""
        return [text for text in self._syntax.starts if text not in self._syntax.again]

    def _group(self, *, headed: bool = False) -> str:
        """Write one group. The first one of a message may have no marker, in some formats."""
        heads = [self._rules.marker(text) for text in self._heads]
        head = choice(heads) if heads else ""
        head = f"({head})?" if head and self._syntax.bare and not headed else head
        opening = self._opening(self._syntax.opening)
        return self._rules.rule(sequence(head, opening, self._call, self._more(), self._closing()))

    def _more(self) -> str:
        """Write further calls of the same group."""
        syntax, space = self._syntax, self._rules.space
        if not self._parallel or not (syntax.between or syntax.again):
            return ""
        gap = space if isinstance(_chosen(syntax.call)[0], Name) else ""
        ways = [
            sequence(space, self._rules.marker(text), gap, self._call) for text in syntax.between
        ]
        if syntax.again:
            ways.append(sequence(quoted("\n") if "" in syntax.again else "", self._call))
        return f"{choice(ways)}*" if len(ways) > 1 else f"({ways[0]})*"

    def _closing(self) -> str:
        syntax, rules = self._syntax, self._rules
        closing = [sequence(rules.space, rules.marker(text)) for text in syntax.closing]
        if syntax.bare:  # what closes a marker may be missing, like the marker
            closing = [
                f"({one})?" if text.startswith("<") else one
                for one, text in zip(closing, syntax.closing, strict=True)
            ]
        if len(syntax.starts) == len(closing) > 1:  # one end for each start
            return choice(closing)
        return sequence(*closing)

    # -- single calls

    def _any_call(self, steps: Sequence[Step]) -> str:
        """Write the steps of a call of any of the functions."""
        call = sequence(*self._steps(_chosen(steps)))
        return self._rules.calls(call) if NAME in call else self._rules.rule(call)

    def _opening(self, steps: Sequence[Step]) -> str:
        """Write the steps before the first call."""
        return sequence(*self._steps(_chosen(steps)))


class _ChannelWriter(_Writer):
    """Writes rows of messages; calls are messages, too."""

    def __init__(
        self, channels: Channels, functions: list[Function], parallel: bool, opened: bool
    ) -> None:
        for function in functions:
            if not _CHANNEL_NAME.fullmatch(function.name) or function.name == "all":
                raise function.refuse_name()
        before = [channels.call_header.split("{}")[0] or channels.start]
        for mark, following in itertools.pairwise(channels.body):
            before += texts_in(mark) if isinstance(following, Name) else ()
        named = [(function, function.name) for function in functions]
        super().__init__(_arguments_in(channels.body), named, before)
        self._channels = channels
        # If messages have an end marker, a call is the last one, unless that is between calls.
        self._parallel = parallel and (not channels.ends or bool(channels.between))
        self._open = opened

    @property
    def _next(self) -> str:
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
        call = rules.calls(
            sequence(
                NAME,
                f"({rules.marker(after)})?" if after else "",
                rules.marker(channels.message),
                *self._steps(channels.body),
            )
        )
        return call if rest or not before else sequence(rules.marker(before), call)

    def _calls(self, first: str) -> str:
        if not self._parallel:
            return first
        rules, between = self._rules, self._channels.between
        end = rules.marker(between) if between else ""
        return sequence(first, f"({sequence(rules.space, end, self._next, self._call())})*")

    def calls(self) -> Grammar:
        return self._grammar(self._calls(self._first(self._call())), required=True)

    def calls_or(self, answer: Grammar) -> Grammar:
        rules, channels = self._rules, self._channels
        said = sequence(
            rules.marker(channels.content_header),
            rules.marker(channels.message),
            rules.space,
            rules.schema(_schema_of(answer), answer.param),
        )
        first = self._first(choice([self._calls(self._call()), said]))
        return self._grammar(first, required=True)

    def lazy(self) -> Grammar:
        channels, rules = self._channels, self._rules
        first = channels.body[0]
        if isinstance(first, Marker):  # other headers begin as that of a call does
            rest = rules.calls(sequence(*self._steps(channels.body[1:])))
            return self._grammar(self._calls(rest), triggers=((first.text,),))
        before = channels.call_header.split("{}")[0]
        if before:
            return self._grammar(self._calls(self._call(rest=True)), triggers=((before,),))
        # A header is nothing but a name, so that each message has to be looked at.
        start = channels.start
        content = rules.marker(channels.content_header + channels.message)
        calls = self._calls(self._call())
        last = rules.terminal(f"{ANYTHING} & ~/(?s:.*){re.escape(start)}(?s:.*)/")
        talk = choice([sequence(content, rules.text(ANYTHING, start), calls), f"{content} {last}"])
        body = choice([calls, talk])
        if self._open:
            return self._grammar(body)
        return self._grammar(body, triggers=((start,),))
