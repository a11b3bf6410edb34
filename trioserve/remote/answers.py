"""The answers of a server about itself and its models, as far as they are read here."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from trioserve.types import FinishReason, Timings

#: A text of a server that fits into a line of a terminal: it has no control characters.
Text: TypeAlias = Annotated[
    str, msgspec.Meta(max_length=1000, pattern=r"^[^\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z")
]

#: A number of a server: bytes, tokens or requests.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Status(msgspec.Struct):
    value: Text = "loaded"
    failed: bool = False


class _Meta(msgspec.Struct):
    size: Count | None = None


class Model(msgspec.Struct):
    """A model in the list of a server. A server of one model gives it no status."""

    id: Text
    aliases: list[Text] = []
    status: _Status | None = None
    size: Count | None = None
    meta: _Meta | None = None

    @property
    def state(self) -> str:
        """The status in a word."""
        return "loaded" if self.status is None else self.status.value


class Models(msgspec.Struct):
    """The answer of ``/v1/models``."""

    data: list[Model]


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int
    function: _Function
    id: str | None = None


class Delta(msgspec.Struct):
    """A part of the message of a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    """The tokens of a request."""

    prompt_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: _Details | None = None


class Ending(msgspec.Struct):
    """The end of an output, in the form of llama-server's own routes."""

    stop_type: FinishReason = FinishReason.NONE
    stopping_word: str = ""
    truncated: bool = False
    id_slot: int = -1
    prompt: str = ""
    timings: Timings = Timings()


class AnswerEvent(msgspec.Struct):
    """An event of the answer to a chat or to a completion."""

    model: str = ""
    choices: list[_Choice] = []
    usage: Usage | None = None
    timings: Timings | None = None
    ending: Ending | None = msgspec.field(default=None, name="__verbose")

    @property
    def counted(self) -> Timings | None:
        """The numbers of tokens, for a server that tells no timings."""
        if (used := self.usage) is None:
            return None
        n_cached = (used.prompt_tokens_details or _Details()).cached_tokens or 0
        n_prompt = max(used.prompt_tokens - n_cached, 0)
        return Timings(cache_n=n_cached, prompt_n=n_prompt, predicted_n=used.completion_tokens)


class CompletionEvent(Ending):
    """An event of ``/completion``. `stop`: it is the last one."""

    content: str = ""
    tokens: list[int] = []
    stop: bool = False
