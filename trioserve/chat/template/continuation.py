"""Assistant prefill: a chat whose last message was begun by the client, for the model to go on.

The messages before it are rendered as always. The prompt then goes on with what the assistant has
said so far, and is left open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta
from trioserve.chat.formats.syntax import ChatFormat, Reasoning
from trioserve.chat.messages import Message, parse_messages
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import InvalidRequestError, UnsupportedFieldError

#: The part of the last message that goes on. "auto": its reasoning, if it has nothing else.
Part: TypeAlias = Literal["auto", "content", "reasoning_content"]

PARTS: tuple[Part, ...] = ("auto", "content", "reasoning_content")


def part_of(messages: object, wanted: Part) -> Part:
    """Decide which part of the last message goes on.

    Raises:
        InvalidRequestError: the last message is not one that can go on; `param` names it.
    """
    last = parse_messages(messages)[-1]
    path = f"messages[{len(messages) - 1}]"  # type: ignore[arg-type]
    if last["role"] != "assistant":
        raise InvalidRequestError(
            f"'{path}.role' is {last['role']!r}, and only a message of the assistant can go on.",
            param=f"{path}.role",
        )
    if "tool_calls" in last:
        raise InvalidRequestError(
            f"'{path}' has tool calls, so it cannot go on.", param=f"{path}.tool_calls"
        )
    if wanted != "auto":
        return wanted
    return "reasoning_content" if "reasoning_content" in last and not _text(last) else "content"


def render_open(
    template: ChatTemplate,
    format: ChatFormat,
    messages: Sequence[Mapping[str, Any]],
    part: Part,
    *,
    tools: object = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render messages so that the model goes on with a part of the last one.

    Raises:
        TemplateError: the template refuses the messages.
        UnsupportedFieldError: reasoning is to go on, and this model has none; or it writes its
            messages in channels.
        InvalidRequestError: there is nothing before the last message, or one is malformed.
    """
    part = part_of(messages, part)
    last = parse_messages(messages)[-1]
    if len(messages) == 1:
        raise InvalidRequestError(
            "'messages' must have a message before the one that goes on.", param="messages"
        )
    if format.channels is not None:  # how their headers are written is not known, only read
        raise UnsupportedFieldError(
            "A message of this model cannot be begun for it.",
            param=f"messages[{len(messages) - 1}]",
        )
    before = messages[:-1]
    closed = template.render(before, tools=tools, add_generation_prompt=False, kwargs=kwargs)
    opened = template.render(before, tools=tools, add_generation_prompt=True, kwargs=kwargs)
    if format.reasoning is not None:
        begun = opened.find(format.reasoning.start, _shared(closed, opened))
        prompt = opened if begun < 0 else opened[:begun]
        return prompt + _reasoning(template, format.reasoning, last, part)
    if part == "reasoning_content":
        path = f"messages[{len(before)}].reasoning_content"
        raise UnsupportedFieldError("This model writes no reasoning to go on with.", param=path)
    return opened + _text(last)


def begun_with(messages: Sequence[Mapping[str, Any]], part: Part, format: ChatFormat) -> str:
    """Say to the parser what the prompt has begun: reasoning, by its marker, or content.

    Text that looks like a marker is in the message, so the end of the prompt itself says nothing.
    """
    in_reasoning = part_of(messages, part) == "reasoning_content"
    return format.reasoning.start if in_reasoning and format.reasoning is not None else ""


def begun(messages: Sequence[Mapping[str, Any]]) -> tuple[Delta, ...]:
    """What the last message has already, as if the model had said it."""
    last = parse_messages(messages)[-1]
    deltas: list[Delta] = []
    if thought := last.get("reasoning_content"):
        deltas.append(ReasoningDelta(thought))
    if text := _text(last):
        deltas.append(ContentDelta(text))
    return tuple(deltas)


def _shared(closed: str, opened: str) -> int:
    """Where the head of an answer begins, if the prompts differ in nothing else."""
    return len(closed) if opened.startswith(closed) else 0


def _reasoning(template: ChatTemplate, reasoning: Reasoning, last: Message, part: Part) -> str:
    """Write a message that has reasoning. The template may have begun it, or ended it at once."""
    start, end = _marks(template, reasoning)
    begun: str = start + last.get("reasoning_content", "")
    return begun if part == "reasoning_content" else begun + end + _text(last)


def _marks(template: ChatTemplate, reasoning: Reasoning) -> tuple[str, str]:
    """Find out how the template writes the markers of reasoning: with which blanks around them."""
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


#: Stand for reasoning and an answer; templates change neither.
_THOUGHT, _ANSWER = "Thought0", "Answer0"


def _text(message: Message) -> str:
    """The content of a message; its parts with an empty line between, as llama-server has it."""
    content: str | list[dict[str, Any]] = message["content"]
    if isinstance(content, str):
        return content
    return "\n\n".join(part["text"] for part in content)
