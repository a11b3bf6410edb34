"""Renders messages by a chat template: adapts them to it, and runs it in the sandbox."""

from __future__ import annotations

import copy
import datetime
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jinja2

from trioserve.chat.derive.probes import Probes
from trioserve.chat.derive.recognize import Recognized, recognize
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.messages import (
    ROLES,
    Message,
    Tool,
    join_text,
    parse_messages,
    parse_tools,
)
from trioserve.chat.template import capabilities, repairs
from trioserve.chat.template.capabilities import PRESERVE_REASONING, Capabilities
from trioserve.chat.template.repairs import Conversation, Repair
from trioserve.chat.template.sandbox import Limits, Meter, OutOfTimeError, Output, Sandbox, running
from trioserve.chat.template.turns import (
    Turns,
    read_object,
    with_calls_as_text,
    with_results_as_text,
    with_tools,
)
from trioserve.errors import InvalidRequestError, TemplateError

#: The longest template, in characters. Those of known models have up to 17,000.
MAX_SOURCE = 200_000

#: The limits of a render of a few short messages, which finds out the capabilities.
_PROBE_LIMITS = Limits(value=1 << 20, made=8 << 20, seconds=0.2)

#: Seconds of processor time that all probes may take; no template of a model takes a tenth of it.
_MAX_PROBING = 3.0

#: Variables for today's date, and their forms.
_DATES: Mapping[str, str] = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


@attrs.define
class Probing:
    """The probes of a template: the processor time that they took, and the repairs, once found."""

    seconds: float = 0.0
    repairs: tuple[Repair, ...] | None = None


class ChatTemplate:
    """Turns messages into a prompt, by a template in jinja2 that need not be trusted.

    It may be used from several threads at once.

    Attributes:
        takes_tools: whether chats may have tools at all, be it as text.

    Raises:
        TemplateError: the template is not valid.
    """

    takes_tools = True

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        limits: Limits | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._limits = Limits() if limits is None else limits
        self._now = now
        self._template, self._wants = _compile(source, now)
        self._probing = Probing()  # the same in copies

    def with_limits(self, limits: Limits) -> ChatTemplate:
        """Make the same template with other limits. With `Limits.hurried`, `render` raises
        `OutOfTimeError` when it takes too long.
        """
        other = copy.copy(self)
        other._limits = limits
        return other

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The features of the template. The first look renders it a few dozen times."""
        return capabilities.find(self._probe)

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """The repairs of conversations that the template needs, in their order.

        The first look renders a hundred small conversations. It may take 50 ms.
        """
        if self._probing.repairs is None:
            self._probing.repairs = repairs.find(self._probe_repaired)
        return self._probing.repairs

    @functools.cached_property
    def format(self) -> ChatFormat:
        return self.recognized.format

    @functools.cached_property
    def recognized(self) -> Recognized:
        """The format of the model, and how it was found: the first look renders the template."""
        can = self.capabilities
        return recognize(
            self.source,
            self.probes,
            shows_tools=can.supports_tools,
            shows_calls=can.supports_tool_calls,
        )

    @functools.cached_property
    def probes(self) -> Probes:
        """Renders answers, as they are."""
        can, field = self.capabilities, self.capabilities.reasoning_field
        return Probes(
            self._probe,
            as_objects=can.supports_object_arguments,
            reason=None if field is None else functools.partial(capabilities.with_reasoning, field),
            fill=can.thinking.fill,
        )

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render OpenAI's messages, and tools if there are any, to a prompt.

        `kwargs` are variables of the template, such as ``enable_thinking``. One that is not given
        is not defined, so the template decides. Where the template has no place for tools, the
        prompt describes them as text, and says how to call them.

        Raises:
            TemplateError: the template refuses the messages, or does more than it may.
            UnsupportedFieldError: something is not text, or the template has a place for fewer
                tool calls.
            InvalidRequestError: `param` names the invalid part.
        """
        for name in _RESERVED & (kwargs or {}).keys():
            raise InvalidRequestError(
                f"'chat_template_kwargs' may not set {name!r}.",
                param=f"chat_template_kwargs.{name}",
            )
        variables: dict[str, Any] = {**self._absent, **(kwargs or {})}
        self._set_thinking(variables)
        variables["add_generation_prompt"] = add_generation_prompt
        turns = list(enumerate(parse_messages(messages)))
        prompt = self._render(turns, parse_tools(tools), variables, self.repairs, self._limits)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError.at(
                "messages", "hold half of a surrogate pair, which is not a character."
            ) from error
        return prompt

    # -- adapting messages to the template

    def _render(
        self,
        turns: Turns,
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        repairs: Sequence[Repair],
        limits: Limits,
    ) -> str:
        """Render messages, each with its place in the request, in the forms of the template."""
        if tools and not self.capabilities.supports_tools:
            turns = with_tools(turns, tools)
            tools = ()
        if not self._shows_results:
            turns = with_results_as_text(turns)
        turns = [(place, self._in_known_role(place, one)) for place, one in turns]
        for repair in repairs:
            if repair.messages is not None:
                turns = repair.messages(turns)
            elif repair.tool is not None:
                tools = [repair.tool(tool) for tool in tools]
        if tools:
            variables = {**variables, "tools": list(tools)}
        messages = [self._in_form(message) for _, message in turns]
        return self._run(messages, variables, [place for place, _ in turns], limits)

    def _in_known_role(self, place: int, message: Message) -> Message:
        message = self._with_text_for_calls(message)
        role = self._role(message["role"], f"messages[{place}]")
        return message if role == message["role"] else {**message, "role": role}

    def _in_form(self, message: Message) -> Message:
        """Give content, arguments and reasoning the forms that the template reads."""
        adapted = dict(message)
        can, role, content = self.capabilities, message["role"], message["content"]
        typed, strings = role in can.typed_roles, role in can.string_roles
        if isinstance(content, list) and not (typed and content):
            adapted["content"] = content = join_text(content)
        if isinstance(content, str) and typed and not strings:
            adapted["content"] = [{"type": "text", "text": content}]
        if "tool_calls" in message and can.supports_object_arguments:
            adapted["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        field = can.reasoning_field
        if field is not None and "reasoning_content" in adapted:
            adapted = capabilities.with_reasoning(field, adapted, adapted.pop("reasoning_content"))
        return adapted

    def _with_text_for_calls(self, message: Message) -> Message:
        """Write calls as text where the template has no place for them, or for tools."""
        can = self.capabilities
        if "tool_calls" in message and not (can.supports_tools and can.supports_tool_calls):
            return with_calls_as_text(message)
        return message

    @property
    def _shows_results(self) -> bool:
        return self.capabilities.supports_tools and self.capabilities.supports_tool_results

    def _role(self, role: str, path: str) -> str:
        if f"'{role}'" in self.source or f'"{role}"' in self.source:
            return role
        if role not in ROLES:
            raise InvalidRequestError.at(
                f"{path}.role", f"is {role!r}, which the chat template of this model does not know."
            )
        return "system" if role == "developer" else role

    def _set_thinking(self, variables: dict[str, Any]) -> None:
        """Give llama-server's variables under the names that templates have for them."""
        self.capabilities.thinking.fill(variables)
        if isinstance(keep := variables.get("preserve_reasoning"), bool):
            for other, value in PRESERVE_REASONING.items():
                variables.setdefault(other, value if keep else not value)

    # -- rendering

    def _run(
        self,
        messages: list[Message],
        variables: Mapping[str, Any],
        places: list[int],
        limits: Limits,
    ) -> str:
        """Render. `places` are the places of the messages in the request, for error messages."""
        given = {**self._tokens, **self._extra(variables), **variables, "messages": messages}
        by_id = {id(message): place for message, place in zip(messages, places, strict=True)}
        meter = Meter(limits, given, by_id)
        token = running.set(meter)
        try:
            pieces = Output()
            for piece in self._template.generate(given):
                pieces.append(piece)  # which counts it
        except Exception as error:
            if limits.hurried and isinstance(error, OutOfTimeError):
                raise
            raise _explain(error, meter.place) from error
        finally:
            running.reset(token)
        return "".join(pieces)

    def _extra(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """Give today's date, and what one family of models wants in place of tools."""
        extra = {}
        for name in _DATES.keys() & self._wants:
            # Without `date_string`, some templates write a day of 2024.
            extra[name] = self._now().strftime(_DATES[name])
        if {"functions", "datetime"} <= self._wants:
            tools = variables.get("tools") or []
            extra["functions"] = json.dumps(tools, ensure_ascii=False, indent=4)
        return extra

    @functools.cached_property
    def _absent(self) -> dict[str, None]:
        """The values of tools and documents in a chat without them.

        The library that models are trained with sets them to none. A few templates only work
        when they are not defined at all.
        """
        absent = {"tools": None, "documents": None}
        messages: list[Message] = [{"role": "user", "content": "Hello"}]
        for candidate in (absent, {}):
            try:
                self._run(messages, candidate, [0], _PROBE_LIMITS)
            except TemplateError:
                continue
            return candidate
        return absent

    def _probe(self, messages: list[Message], **variables: Any) -> str | None:
        variables = {**self._absent, "add_generation_prompt": True, **variables}
        places = list(range(len(messages)))
        return self._tried(partial(self._run, messages, variables, places, _PROBE_LIMITS))

    def _probe_repaired(self, asked: Conversation, repairs: Sequence[Repair]) -> str | None:
        variables = {**self._absent, "add_generation_prompt": True}
        turns = list(enumerate(asked.turns))
        return self._tried(
            partial(self._render, turns, asked.tools, variables, repairs, _PROBE_LIMITS)
        )

    def _tried(self, render: Callable[[], str]) -> str | None:
        """Render a probe; None: the template refuses it, or has taken too long for all so far."""
        if self._probing.seconds > _MAX_PROBING:
            return None
        began = time.thread_time()
        try:
            return render()
        except TemplateError:
            return None
        finally:
            self._probing.seconds += time.thread_time() - began


def _compile(
    source: str, now: Callable[[], datetime.datetime]
) -> tuple[jinja2.Template, frozenset[str]]:
    """Give a template, and the names of the variables that it takes."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(
            f"The chat template has {len(source)} characters, and {MAX_SOURCE} are allowed.",
            param="chat_template",
        )
    try:
        return Sandbox(now).compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"The chat template is not valid in line {error.lineno}: "
            f"{(error.message or '').rstrip('.')}.",
            param="chat_template",
        ) from error
    except Exception as error:  # such as RecursionError, and SyntaxError from Python's compiler
        raise TemplateError(
            f"The chat template cannot be compiled: {_describe(error)}", param="chat_template"
        ) from error


def _explain(error: Exception, place: int | None) -> TemplateError:
    param = "messages" if place is None else f"messages[{place}]"
    if isinstance(error, TemplateError):
        message = error.message
    elif isinstance(error, OutOfTimeError):
        message = "The chat template does too much work."
    else:
        message = f"The chat template failed: {_describe(error)}"
    if place is not None:
        message = f"{param}: {message}"
    return TemplateError(message, param=param)


def _describe(error: Exception) -> str:
    text = str(error)[:300]
    if isinstance(error, jinja2.TemplateError):
        return text
    return f"{type(error).__name__}: {text}"


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": read_object(function["arguments"])}}
