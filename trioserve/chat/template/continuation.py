"""Prompts made by rendering a chat in another way: to continue its final message, or to find out
where the prompts of other chats are likely to diverge from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta
from trioserve.chat.formats.syntax import ChatFormat, Reasoning
from trioserve.chat.messages import Message, Messages, parse_messages
from trioserve.chat.params import ContinueFinalMessage
from trioserve.chat.template.render import ChatTemplate
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

    Raises:
        TemplateError: the template refuses the messages.
        UnsupportedFieldError: reasoning is to be continued, and this model writes none; or the
            model writes its messages in channels.
        InvalidRequestError: there is nothing before the final message, or a message is malformed.
    """
    *others, final = messages = parse_messages(messages)
    part, before = continued_part(messages, part), Messages(others)
    if not before:
        raise InvalidRequestError.at(
            "messages", "must have a message before the one that is continued."
        )
    path = f"messages[{len(before)}]"
    if format.channels is not None:  # we know how to read their headers, not how to write them
        raise UnsupportedFieldError("Messages of this model cannot be continued.", param=path)
    closed = template.render(before, tools=tools, add_generation_prompt=False, kwargs=kwargs)
    opened = template.render(before, tools=tools, add_generation_prompt=True, kwargs=kwargs)
    if format.reasoning is None:
        if part == "reasoning_content":
            raise UnsupportedFieldError(
                "This model writes no reasoning that could be continued.",
                param=f"{path}.reasoning_content",
            )
        return opened + _text(final)
    # The template may have opened the reasoning, or opened and closed it: it is written again.
    header_at = len(closed) if opened.startswith(closed) else 0
    reasoning_at = opened.find(format.reasoning.start, header_at)
    prompt = opened if reasoning_at < 0 else opened[:reasoning_at]
    start, end = _markers(template, format.reasoning)
    reasoning: str = final.get("reasoning_content", "")
    prompt += start + reasoning
    return prompt if part == "reasoning_content" else prompt + end + _text(final)


def continued_prompt_tail(
    messages: Sequence[Mapping[str, Any]], part: ContinueFinalMessage, format: ChatFormat
) -> str:
    """Give what the parser takes for the end of the prompt: the marker of reasoning, or nothing.

    The actual end of the prompt is the client's text, which may look like a marker.
    """
    in_reasoning = continued_part(messages, part) == "reasoning_content"
    return format.reasoning.start if in_reasoning and format.reasoning is not None else ""


def final_message_deltas(messages: Sequence[Mapping[str, Any]]) -> tuple[Delta, ...]:
    """Return the text of the final message so far, as if the model had written it."""
    final = parse_messages(messages)[-1]
    deltas: list[Delta] = []
    if reasoning := final.get("reasoning_content"):
        deltas.append(ReasoningDelta(reasoning))
    if text := _text(final):
        deltas.append(ContentDelta(text))
    return tuple(deltas)


def _markers(template: ChatTemplate, reasoning: Reasoning) -> tuple[str, str]:
    """Find out which whitespace the template writes around the markers of reasoning."""
    chat = [
        {"role": "user", "content": "0"},
        {"role": "assistant", "reasoning_content": _THOUGHT, "content": _ANSWER},
    ]
    text = template.render(chat, add_generation_prompt=False)
    thought, answer = text.find(_THOUGHT), text.find(_ANSWER)
    if 0 <= thought < answer:
        start = text[max(0, text.rfind(reasoning.start, 0, thought)) : thought]
        end = text[thought + len(_THOUGHT) : answer]
        if (start.strip(), end.strip()) == (reasoning.start.strip(), reasoning.end.strip()):
            return start, end
    return reasoning.start, reasoning.end


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
