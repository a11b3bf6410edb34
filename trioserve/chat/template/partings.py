"""Where a rendered chat and the prompt that comes after it are likely to part.

That is found out by rendering: the chat without the beginning of an answer, and with another first
and last message of the user. What such a text has in common with the chat's, the next turn, an
edited message, or another user's chat with the same system prompt and tools will have in common
with it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import InvalidRequestError, TemplateError
from trioserve.types.task import shared_length


def find_partings(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: object = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Find out at which characters of a rendered chat another prompt is likely to part from it.

    `messages` are those that it was rendered from; one that is continued may be missing. A variant
    that the template refuses is left out.
    """
    partings = set()
    for other, adds_prompt in _variants(messages):
        try:
            rendered = template.render(
                other, tools=tools, add_generation_prompt=adds_prompt, kwargs=kwargs
            )
        except (TemplateError, InvalidRequestError):
            continue  # alone, this variant makes no chat
        partings.add(shared_length(text, rendered))
    return sorted(partings - {0, len(text)})


def _variants(
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Sequence[Mapping[str, Any]], bool]]:
    """Give chats that are like this one at the beginning, and whether an answer is begun."""
    yield messages, False
    users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    for i in {*users[:1], *users[-1:]}:
        changed = {**messages[i], "content": _other(messages[i].get("content"))}
        yield [*messages[:i], changed, *messages[i + 1 :]], True


def _other(content: object) -> Any:
    """Make a content that differs from the first letter on."""
    if isinstance(content, list):
        return [{"type": "text", "text": _other(part.get("text"))} for part in content[:1]]
    return "b" if str(content).lstrip().startswith("a") else "a"
