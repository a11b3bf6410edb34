"""Templates for models that bring none: by name, as Jinja, or those that llama.cpp has in C++.

The names are llama.cpp's, and "plain". Each template is a file in `templates`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from trioserve.chat.formats.families import PLAIN
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.messages import Message, as_text
from trioserve.chat.template.capabilities import Capabilities
from trioserve.chat.template.render import ChatTemplate, Probing
from trioserve.chat.template.sandbox import Limits
from trioserve.errors import InvalidRequestError, TemplateError, UnsupportedFieldError

_FOLDER = Path(__file__).with_name("templates")

#: Other names of the same template.
_ALIASES = {"granite-4.0": "granite", "granite-4.1": "granite"}

#: The names of the templates.
NAMES = tuple(sorted([*_ALIASES, *(path.stem for path in _FOLDER.glob("*.jinja"))]))


def template_named(name: str) -> str:
    """Read the Jinja of the template of a name, which is one of `NAMES`."""
    return (_FOLDER / f"{_ALIASES.get(name, name)}.jinja").read_text(encoding="utf-8")


#: For models that bring no template, and have the tokens of this one.
CHATML = template_named("chatml")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def source_of(given: str) -> str:
    """Find the Jinja of a template that is given by its name, or by its Jinja.

    Several words are Jinja, too: a text without variables. A single one is a name.

    Raises:
        TemplateError: it is neither; the message lists the names.
    """
    if (name := given.strip()) in NAMES:
        return template_named(name)
    if "{" in given or len(given.split()) > 1:
        return given
    raise TemplateError(f"{given[:40]!r} is neither Jinja nor one of these: {', '.join(NAMES)}.")


#: Renders pairs of role and content by the template that is like the source; None without one.
Apply: TypeAlias = Callable[[str, Sequence[tuple[str, str]], bool], str | None]


class LegacyTemplate(ChatTemplate):
    """One of the templates that are built into llama.cpp, in place of a Jinja template.

    It writes roles and contents, and nothing else: there are no tools, and reasoning stays in the
    content. BOS is left to the tokenizer.

    Args:
        source: the Jinja that llama.cpp recognizes it by, or its name.
        apply: renders.

    Raises:
        TemplateError: llama.cpp has none like this one.
    """

    takes_tools = False

    def __init__(self, source: str, apply: Apply) -> None:
        self.source = source
        self._apply = apply
        self._limits = Limits()
        self._probing = Probing()
        if apply(source, [("user", "test")], True) is None:
            raise TemplateError(
                "llama.cpp has no built-in template like this one; leave out --no-jinja, or name a "
                "built-in one with --chat-template.",
                param="chat_template",
            )

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            supports_string_content=True,
            supports_system_role=True,
            string_roles=frozenset({"system", "user", "assistant"}),
        )

    @functools.cached_property
    def format(self) -> ChatFormat:
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
            raise UnsupportedFieldError.at(
                "tools", "need templates in Jinja, and this server runs with --no-jinja."
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
    """Refuse text that a C string in UTF-8 cannot hold. Raises InvalidRequestError."""
    if "\0" in text:
        raise InvalidRequestError.at(path, "holds a null character.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError.at(
            path, "holds half of a surrogate pair, which is not a character."
        ) from error
