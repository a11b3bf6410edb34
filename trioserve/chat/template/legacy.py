"""`LegacyTemplate`: a chat template that is written in C++, and not in Jinja."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from trioserve.chat.formats.families import PLAIN
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.messages import Message
from trioserve.chat.template.budget import Limits
from trioserve.chat.template.capabilities import Capabilities
from trioserve.chat.template.generic import as_text
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import InvalidRequestError, TemplateError, UnsupportedFieldError

#: Renders pairs of role and content by the template that is like the source; None: there is none.
Apply: TypeAlias = Callable[[str, Sequence[tuple[str, str]], bool], str | None]

_ROLES = frozenset({"system", "user", "assistant"})

_CAPABILITIES = Capabilities(
    supports_string_content=True,
    supports_typed_content=False,
    supports_tools=False,
    supports_tool_calls=False,
    supports_parallel_tool_calls=False,
    supports_system_role=True,
    supports_preserve_reasoning=False,
    supports_reasoning_effort=False,
    supports_object_arguments=False,
    supports_tool_results=False,
    supports_enable_thinking=False,
    typed_roles=frozenset(),
    string_roles=_ROLES,
    thinking_variable=None,
    reasoning_field=None,
)


class LegacyTemplate(ChatTemplate):
    """One of the templates that are built into llama.cpp, in place of a Jinja template.

    It writes roles and contents, and nothing else: there are no tools, and reasoning stays in the
    content. BOS is left to the tokenizer.

    Args:
        source: the Jinja that tells which one it is, or the name of one.
        apply: renders.

    Raises:
        TemplateError: there is none like this one.
    """

    takes_tools = False

    def __init__(self, source: str, apply: Apply) -> None:
        self.source = source
        self._apply = apply
        self._limits = Limits()
        if apply(source, [("user", "test")], True) is None:
            raise TemplateError(
                "llama.cpp has no built-in template like this one; leave out --no-jinja, or name a "
                "built-in one with --chat-template.",
                param="chat_template",
            )

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The same for all of them."""
        return _CAPABILITIES

    @functools.cached_property
    def format(self) -> ChatFormat:
        """All output is content."""
        return PLAIN

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Like `ChatTemplate.render`, but variables change nothing, and tools are refused."""
        if tools:
            raise UnsupportedFieldError(
                "'tools' need templates in Jinja, and this server runs with --no-jinja.",
                param="tools",
            )
        return super().render(messages, add_generation_prompt=add_generation_prompt, kwargs=kwargs)

    def _run(
        self,
        messages: list[Message],
        variables: Mapping[str, Any],
        places: list[int],
        limits: Limits,
    ) -> str:
        turns = []
        for place, message in zip(places, messages, strict=True):
            turn = (message["role"], as_text(message["content"]))
            _check_text("".join(turn), f"messages[{place}]")
            turns.append(turn)
        text = self._apply(self.source, turns, bool(variables.get("add_generation_prompt")))
        if text is None:
            raise TemplateError("The chat template cannot be applied.", param="messages")
        return text


def _check_text(text: str, path: str) -> None:
    """Refuse what no C string in UTF-8 can hold. Raises InvalidRequestError."""
    if "\0" in text:
        raise InvalidRequestError(f"'{path}' holds a null character.", param=path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"'{path}' holds half of a surrogate pair, which is not a character.", param=path
        ) from error
