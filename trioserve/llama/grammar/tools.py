"""The grammar of calls of tools: the functions that may be called, and their arguments.

Where there are many functions, the arguments of each are enforced once the model has written its
name. A schema that llguidance cannot enforce is relaxed, unless its function is strict.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from time import thread_time
from typing import Any

import attrs
from llguidance import LLMatcher

from trioserve.chat.grammar.arguments import load_step, write_any_arguments, write_arguments
from trioserve.chat.grammar.kinds import Shape
from trioserve.chat.grammar.plain import plain
from trioserve.chat.grammar.regular import as_pattern
from trioserve.chat.grammar.relaxed import as_sent, ladder
from trioserve.chat.grammar.schemas import (
    ARGUMENTS,
    NAME,
    Part,
    Rules,
    choice,
    quoted,
)
from trioserve.errors import InvalidRequestError, OutputError
from trioserve.llama.grammar import trial
from trioserve.llama.grammar.json_schema import UnusableError, brief, read_schema
from trioserve.llama.grammar.stack import with_stack
from trioserve.log import get_logger
from trioserve.types import TokenId

_log = get_logger("llama")

#: With more functions, or longer schemas, arguments are enforced once the name is known.
_MAX_AT_ONCE = 48
_MAX_AT_ONCE_CHARS = 2**17
#: Functions whose arguments are enforced at the same time, if names come one by one.
MAX_ENFORCED = 16
#: Grammars with some of the functions that are kept.
_MAX_KEPT = 16
#: Schemas of tools whose relaxation is not logged again.
_MAX_LOGGED = 4096

#: Seconds of a CPU to find out what can be enforced of a function: before an output, and in it.
_SECONDS, _SECONDS_LATE = 1.0, 0.1
#: Characters of a schema that is enforced once its function is named.
_MAX_LATE = 2**17
#: Costly grammars that are tried for the tools of a request.
_MAX_TRIALS = 8


@attrs.frozen(slots=False)
class _Function:
    """A function, as the description of the grammar has it; see `Function.described`."""

    name: str
    written: str
    schema: Any
    param: str
    strict: bool

    @property
    def as_sent(self) -> Part:
        """The schema of its arguments. Raises InvalidRequestError for another value."""
        schema = plain(self.schema, strict=self.strict)
        return as_sent(Part(schema, schema, self.param))

    @cached_property
    def shape(self) -> Shape:
        """The form of its arguments, as its reader knows it."""
        return Shape(self.schema, self.schema)

    @cached_property
    def is_long(self) -> bool:
        """True if an output should not wait until it is compiled."""
        return len(json.dumps(self.schema)) > _MAX_LATE


class ToolGrammar:
    """Compiles the grammar of calls, for all functions at once or for those that are called.

    `start` is called once, and then `enforcing` from any thread.

    Args:
        source: what `trioserve.chat.grammar.answer` has written.
        control: control tokens by name.
        ends: tokens that end an output at any point.
        options: llguidance's, for JSON.
        limits: llguidance's, for a trial.
        compile: compiles a grammar in llguidance's form, or raises UnusableError.
        explain: compiles a schema, or raises UnusableError that says where the problem is.
    """

    def __init__(
        self,
        source: str,
        control: Mapping[str, TokenId],
        ends: frozenset[TokenId],
        *,
        options: Any,
        limits: Mapping[str, Any],
        compile: Callable[[str], LLMatcher],
        explain: Callable[[Any], None],
    ) -> None:
        self._parts = json.loads(source)
        self._functions = [_Function(**one) for one in self._parts["functions"]]
        self._step = load_step(self._parts["arguments"])
        self._control, self._ends = control, ends
        self._options, self._limits = options, limits
        self._compile, self._explain = compile, explain
        #: Arguments are enforced once a name is known.
        self.grows = len(self._functions) > _MAX_AT_ONCE or len(source) > _MAX_AT_ONCE_CHARS
        #: The enforced part of each function that was looked at; None: nothing.
        self._settled: dict[int, Part | None] = {}
        self._n_trials = _MAX_TRIALS
        #: An output has begun, which waits for what is compiled.
        self._is_late = False
        self._kept: OrderedDict[frozenset[int], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self) -> LLMatcher:
        """Compile what an output begins with.

        Raises:
            InvalidRequestError: the schema of a strict function is malformed, or has no notation.
            UnusableError: it cannot be enforced, or the rest of the grammar cannot.
        """
        for function in self._functions:
            if function.strict:
                _checked({"schema": function.as_sent.schema, "param": function.param})
        every = frozenset(range(len(self._functions)))
        if not self.grows:
            try:
                return self._compiled(every)
            except UnusableError as error:
                if error.param:
                    raise
                self.grows = True  # together they are too much
        for index in every:
            if self._functions[index].strict:
                self._settle(index)
        written = [function.written for function in self._functions]
        self.names = NameFinder(written, self._parts["before"])
        try:
            matcher = self._compiled(frozenset())
        except UnusableError:
            for entry in self._parts["schemas"].values():  # of an answer beside the calls
                self._explain_entry(entry)
            raise
        self._is_late = True
        return matcher

    def enforcing(self, functions: frozenset[int]) -> LLMatcher | None:
        """Compile the grammar again, with the arguments of some functions; None if it cannot be."""
        with self._lock:
            if functions in self._kept:
                self._kept.move_to_end(functions)
                return self._kept[functions].deep_copy()
            try:
                matcher = with_stack(lambda: self._compiled(functions))
            except (UnusableError, OutputError) as error:
                names = [self._functions[index].name for index in sorted(functions)]
                _log.warning("arguments of tools are not enforced", tools=names, problem=str(error))
                return None
            self._kept[functions] = matcher
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    def _compiled(self, functions: frozenset[int]) -> LLMatcher:
        """Compile all of the grammar; with relaxed schemas if it must be."""
        is_tried = self._is_late and any(self._functions[i].strict for i in functions)
        for index in functions if self._is_late else ():
            if self._functions[index].is_long:
                self._settle(index)
        try:
            if not is_tried:
                return self._attempt(self._lark(functions))
        except (UnusableError, InvalidRequestError):
            if not functions:
                raise
        for index in functions:
            self._settle(index)
        self._n_trials = max(1, self._n_trials)  # for all of them together
        return self._attempt(self._lark(functions), is_tried=is_tried)

    def _attempt(self, lark: str, *, is_tried: bool = False) -> LLMatcher:
        text = str(LLMatcher.grammar_from_lark(lark))
        if not is_tried and trial.is_needed("tools", text):
            if self._is_late or not self._n_trials:
                raise UnusableError("it takes too long to compile")
            self._n_trials -= 1
            try:
                trial.run(text, self._limits)
            except trial.TrialError as error:
                self._n_trials = 0  # one that takes that long is enough
                raise UnusableError(str(error)) from error
        return self._compile(text)

    # -- what is enforced of one function

    def _settle(self, index: int) -> None:
        """Find out what can be enforced of the arguments of a function.

        Raises:
            InvalidRequestError, UnusableError: as `start`.
        """
        if index in self._settled:
            return
        function = self._functions[index]
        if function.strict:
            part = function.as_sent
            self._n_trials = max(1, self._n_trials)
            self._try_strict(part, function)
            self._settled[index] = part
            return
        problems: list[str] = []
        until = thread_time() + (_SECONDS_LATE if self._is_late else _SECONDS)

        def fits(part: Part) -> bool:
            if thread_time() > until:
                return False
            try:
                matcher = self._attempt(self._alone(part, function))
            except (UnusableError, InvalidRequestError) as error:
                problems.append(str(error))
                return False
            matcher.compute_bitmask()  # which may take too much, too
            if matcher.is_error():
                problems.append(brief(matcher.get_error()))
                return False
            return True

        whole = Part(function.schema, function.schema, function.param)
        none: tuple[Part | None, str] = (None, "all arguments")
        if self._is_late and function.is_long:
            (self._settled[index], relaxed), problems = none, ["it is too long"]
        else:
            fitting = (one for one in ladder(whole, fits) if fits(one[0]))
            self._settled[index], relaxed = next(fitting, none)
        if relaxed:
            _note(function, relaxed, problems[0] if problems else "it is malformed")

    def _try_strict(self, part: Part, function: _Function) -> None:
        try:
            self._attempt(self._alone(part, function))
        except UnusableError as error:
            if error.param:
                raise
            rules = Rules()
            write_arguments(rules, self._step, part, function.shape)
            for entry in rules.parts("")["schemas"].values():
                self._explain_entry(entry)
            raise UnusableError(str(error), param=function.param) from error

    def _explain_entry(self, entry: Mapping[str, Any]) -> None:
        try:
            self._explain(_checked(entry))
        except UnusableError as error:
            raise UnusableError(str(error), param=entry["param"]) from None

    # -- Lark

    def _alone(self, part: Part, function: _Function) -> str:
        """Write the arguments of a function and nothing else."""
        rules = Rules("_")
        body = write_arguments(rules, self._step, part, function.shape)
        return self._written(rules.parts(rules.rule(body)))

    def _lark(self, functions: frozenset[int]) -> str:
        """Write the grammar with the arguments of some functions; those of others are free."""
        rules = Rules("_")
        calls = []
        for index in sorted(functions):
            function = self._functions[index]
            calls.append((quoted(function.written), self._arguments(index, rules)))
        written = {self._functions[index].written for index in functions}
        others = [one.written for one in self._functions if one.written not in written]
        if others:
            names = "|".join(map(as_pattern, sorted(set(others))))
            free = rules.rule(write_any_arguments(rules, self._step))
            calls.append((rules.terminal(f"/({names})/"), free))
        lines = [
            f"{rule}: "
            + choice(
                rules.rule(body.replace(NAME, name).replace(ARGUMENTS, arguments))
                for name, arguments in calls
            )
            for rule, body in self._parts["calls"].items()
        ]
        return "\n".join([self._written(self._parts), *lines, self._written(rules.parts(""))])

    def _arguments(self, index: int, rules: Rules) -> str:
        """Write the arguments of a function."""
        function = self._functions[index]
        part: Part | None = None
        if index not in self._settled:
            try:
                part = function.as_sent
                write_arguments(Rules(), self._step, part, function.shape)
            except InvalidRequestError:
                self._settle(index)
        part = self._settled.get(index, part)
        if part is None:
            return rules.rule(write_any_arguments(rules, self._step))
        return rules.rule(write_arguments(rules, self._step, part, function.shape))

    def _written(self, parts: Mapping[str, Any]) -> str:
        return as_lark(parts, self._control, self._ends, self._options)


def as_lark(
    parts: Mapping[str, Any],
    control: Mapping[str, TokenId],
    ends: frozenset[TokenId],
    options: Mapping[str, Any],
) -> str:
    """Write `Rules.parts` in Lark. Raises UnusableError for a schema that cannot be enforced."""
    lines = [parts["rules"]]
    for name, text in parts["markers"].items():
        lines.append(f"{name}: {_marker(text, control, ends)}")
    for name, entry in parts["texts"].items():
        lines += _text(name, entry["body"], entry["end"], control, ends)
    for name, entry in parts["schemas"].items():
        schema = {**_checked(entry), "x-guidance": options}
        lines.append(f"{name}: %json {json.dumps(schema)}")
    return "\n".join([*lines, ""])


@attrs.frozen
class _Relaxation:
    """A schema that is enforced in part. Those of one function are equal."""

    digest: bytes
    tool: str = attrs.field(eq=False)
    relaxed: str = attrs.field(eq=False)
    problem: str = attrs.field(eq=False)


def _note(function: _Function, relaxed: str, problem: str) -> None:
    """Log which part of a schema is not enforced, once."""
    text = json.dumps([function.name, function.schema])
    digest = sha256(text.encode()).digest()
    _log_once(_Relaxation(digest, function.name, relaxed, problem))


@lru_cache(maxsize=_MAX_LOGGED)
def _log_once(one: _Relaxation) -> None:
    event = "the schema of a tool is relaxed"
    _log.info(event, tool=one.tool, relaxed=one.relaxed, problem=one.problem)


class NameFinder:
    """Finds the names of functions in an output, as far as the model has written them.

    Args:
        written: the names, as the model writes them.
        before: the texts that one stands behind; none: any, because it has quotes or a prefix.
    """

    #: Stands for the beginning of an output.
    START = b"\xff"

    def __init__(self, written: Sequence[str], before: Sequence[str]) -> None:
        names = [name.encode() for name in written]
        self._indices: dict[bytes, set[int]] = {}
        for index, name in enumerate(names):
            self._indices.setdefault(name, set()).add(index)
        heads = [self.START, *(text.strip().encode() for text in before)] if before else []
        first, last = min(names), max(names)
        n_common = next(
            (i for i in range(len(first)) if first[: i + 1] != last[: i + 1]), len(first)
        )
        # The text before a name, or the beginning of all names. A pattern of all names would take
        # longer to compile than the grammar.
        self._place = (
            re.compile(b"(?:" + b"|".join(map(re.escape, heads)) + rb")\s*")
            if heads
            else re.compile(b"(?=" + re.escape(first[:n_common]) + b")")
        )
        self._lengths = sorted({len(name) for name in names}, reverse=True)
        self._longer = _extensions(list(self._indices))
        #: Bytes of an output that it has to see again.
        self.size = self._lengths[0] + max(map(len, heads), default=0) + 16

    def find(self, text: bytes) -> frozenset[int]:
        """Find the functions whose names are in a text, and end there."""
        found: set[int] = set()
        for place in self._place.finditer(text):
            rest = text[place.end() :]
            starts = (rest[:length] for length in self._lengths)
            name = next((start for start in starts if start in self._indices), b"")
            if not any(longer.startswith(rest) for longer in self._longer.get(name, ())):
                found |= self._indices.get(name, set())
        return frozenset(found)


def _extensions(names: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """Say for each name which others begin with it."""
    found: dict[bytes, list[bytes]] = {}
    stack: list[bytes] = []
    for name in sorted(names):
        while stack and not name.startswith(stack[-1]):
            stack.pop()
        for shorter in stack:
            found.setdefault(shorter, []).append(name)
        stack.append(name)
    return found


def _checked(entry: Mapping[str, Any]) -> Any:
    try:
        return read_schema(json.dumps(entry["schema"]))
    except UnusableError as error:
        raise UnusableError(str(error), param=entry["param"]) from None


def _marker(text: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]) -> str:
    written = quoted(text)
    tokens = _tokens(text, control, ends)
    return written if tokens is None else f"{written} | {' '.join(tokens)}"


def _tokens(
    text: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]
) -> list[str] | None:
    """Write a text as text and control tokens; None if it has no name of a control token.

    A control token that ends the output ends the text too.
    """
    names = sorted((name for name in control if name in text), key=len, reverse=True)
    if not names:
        return None
    parts = []
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", text):
        if piece not in control:
            parts += [quoted(piece)] if piece else []
        elif control[piece] in ends:
            break
        else:
            parts.append(f"<[{control[piece]}]>")
    return parts or ['""']


def _text(
    name: str, body: str, end: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]
) -> list[str]:
    """Write text up to its end marker, as one lexeme because lexemes are greedy."""
    terminal = name.upper()
    # Blanks before the marker are a part of it, but the body may not hold it without them either.
    found = as_pattern(end.strip() or end)
    lines = [f"{terminal}_BODY: {body} & ~/(?s:.*){found}(?s:.*)/"]
    lines.append(f"{terminal}: {terminal}_BODY {quoted(end)}")
    tokens = _tokens(end, control, ends)
    if tokens is None:
        return [*lines, f"{name}: {terminal}"]
    # Text before the first token must be in the lexeme too, which would take it otherwise.
    n_before = 1 if tokens[0].startswith('"') else 0
    lines.append(f"{terminal}_ALONE: {' '.join([f'{terminal}_BODY', *tokens[:n_before]])}")
    rest = " ".join([f"{terminal}_ALONE", *tokens[n_before:]])
    return [*lines, f"{name}: {terminal} | {rest}"]
