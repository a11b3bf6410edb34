"""Prompts made by rendering a chat in another way: to continue its final message, or to find out
where the prompts of other chats are likely to diverge from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.messages import Message, Messages, parse_messages
from trioserve.chat.params import ContinueFinalMessage
from trioserve.chat.template.render import ChatTemplate
from trioserve.chat.template.turns import FILLER
from trioserve.errors import InvalidRequestError, TemplateError, UnsupportedFieldError
from trioserve.types.task import shared_length


def continued_part(messages: object, part: ContinueFinalMessage) -> ContinueFinalMessage:
    """Decide which part of the final message is continued.

    Raises:
        InvalidRequestError: the final message cannot be continued; `param` names it.
    """
    parsed = parse_messages(messages)
    final, path = parsed[-1], f"messages[{len(parsed) - 1}]"
    if final["role"] != "assistant":
        raise InvalidRequestError.at(
            f"{path}.role", f"is {final['role']!r}, but only an assistant message can be continued."
        )
    if "tool_calls" in final:
        raise InvalidRequestError(
            f"'{path}' has tool calls, so it cannot be continued.", param=f"{path}.tool_calls"
        )
    if part != "auto":
        return part
    return "reasoning_content" if "reasoning_content" in final and not _text(final) else "content"


def render_continued(
    template: ChatTemplate,
    format: ChatFormat,
    messages: Sequence[Mapping[str, Any]],
    part: ContinueFinalMessage,
    *,
    tools: object = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render messages so that the model continues a part of the final one.

    The template writes a message that stands for the final one. Before its text the prompt ends.

    Raises:
        TemplateError: the template refuses the messages.
        UnsupportedFieldError: reasoning is to be continued, and this model writes none.
        InvalidRequestError: a message is malformed.
    """
    *others, final = messages = parse_messages(messages)
    asked, part, before = part, continued_part(messages, part), Messages(others)
    thought: str = final.get("reasoning_content", "")
    if format.thinking is None and part == "reasoning_content":
        if asked == "reasoning_content":
            raise UnsupportedFieldError(
                "This model writes no reasoning that could be continued.",
                param=f"messages[{len(before)}].reasoning_content",
            )
        part, final = "content", {**final, "content": thought}

    def written(**stand_in: str) -> str:
        """Render the chat with another final message, until its content."""
        chat = [*before, {"role": "assistant", **stand_in, "content": _ANSWER}]
        # Some templates leave out the message if it is the last one.
        for after in ([], [{"role": "user", "content": FILLER}]):
            text = template.render(
                Messages([*chat, *after]), tools=tools, add_generation_prompt=False, kwargs=kwargs
            )
            found, is_there, _ = text.rpartition(_ANSWER)
            if is_there:
                return found
        raise TemplateError("The chat template loses the final message.", param="messages")

    reasoning = format.reasoning
    if part == "content" and not thought:
        prompt = written()
        if reasoning is not None and prompt.rstrip().endswith(reasoning.start):
            prompt += reasoning.end  # the template has begun it
        return prompt + _text(final)
    opening, is_there, between = written(reasoning_content=_THOUGHT).rpartition(_THOUGHT)
    if not is_there and reasoning is not None:
        # The template leaves out the reasoning, and may have begun or written an empty one.
        start, between = reasoning.start, reasoning.end
        empty = rf"{re.escape(start)}\s*({re.escape(between)}\s*)?\Z"
        opening = re.sub(empty, "", written()) + start
    elif not is_there:
        return written() + _text(final)
    return opening + thought + (between + _text(final)) * (part == "content")


def continued_prompt_tail(
    messages: Sequence[Mapping[str, Any]], part: ContinueFinalMessage, format: ChatFormat
) -> str:
    """Give what the parser takes for the end of the prompt: the marker of reasoning, or nothing.

    Where the output is a row of messages, it is the header of the one that is continued. The actual
    end of the prompt is the client's text, which may look like a marker.
    """
    in_reasoning = continued_part(messages, part) == "reasoning_content"
    tail = format.thinking.start if in_reasoning and format.thinking is not None else ""
    if (channels := format.channels) is None:
        return tail
    return channels.start + channels.role + (tail or channels.content_header + channels.message)


def final_message_deltas(messages: Sequence[Mapping[str, Any]]) -> tuple[Delta, ...]:
    """Return the text of the final message so far, as if the model had written it."""
    final = parse_messages(messages)[-1]
    deltas: list[Delta] = []
    if reasoning := final.get("reasoning_content"):
        deltas.append(ReasoningDelta(reasoning))
    if text := _text(final):
        deltas.append(ContentDelta(text))
    return tuple(deltas)


#: Stand for the reasoning and the answer: templates strip and escape nothing in them.
_THOUGHT, _ANSWER = "Thought0", "Answer0"


def _text(message: Message) -> str:
    """The content of a message; its parts with an empty line between, as llama-server has it."""
    content: str | list[dict[str, Any]] = message["content"]
    if isinstance(content, str):
        return content
    return "\n\n".join(part["text"] for part in content if part["type"] == "text")


def find_divergence_points(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: object = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Find the characters of a rendered chat at which another prompt is likely to diverge.

    `messages` are those that it was rendered from; one that is continued may be missing. A variant
    that the template refuses is left out.
    """
    points = set()
    for other, adds_prompt in _variants(messages):
        try:
            rendered = template.render(
                other, tools=tools, add_generation_prompt=adds_prompt, kwargs=kwargs
            )
        except (TemplateError, InvalidRequestError):
            continue  # this variant cannot render a chat by itself
        points.add(shared_length(text, rendered))
    return sorted(points - {0, len(text)})


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
