"""What requests for text may hold on Ollama's routes, made by `fields.structure`.

Beside Ollama's fields they take those that all routes share, such as ``seed`` or ``timeout``; what
``options`` says wins. Fields that nobody knows are ignored; one of Ollama's that asks for what this
server does not do is refused, unless its value asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

import attrs

from trioserve.api.base import readers
from trioserve.api.base.chat_request import template_kwargs
from trioserve.api.base.fields import MismatchError, field, json_type, structure
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.neutral import Neutral, only, refuse_unsupported
from trioserve.api.ollama.describe import can_think
from trioserve.api.ollama.messages import (
    continues_final_message,
    read_messages,
    read_tools,
    with_images,
)
from trioserve.api.ollama.options import Options, refuse_fixed
from trioserve.chat.messages import Messages, Tools
from trioserve.chat.params import ChatParams
from trioserve.errors import InvalidRequestError
from trioserve.server import Server
from trioserve.types import Grammar

#: Candidates for each token, as in Ollama.
_MAX_TOP_LOGPROBS = 20

#: Known fields without effect, and which of their values change nothing. Null never does.
NEUTRAL: Mapping[str, Neutral] = {
    "_debug_render_only": only(False),
    "n": only(1),
    "n_cmpl": only(1),
    "queue_comments": only(False),
    "return_progress": only(False),
    "stream_options": only({}, {"include_usage": True}),
    "timings_per_token": only(False),
    "trioserve_run_tools": only(False),
    "truncate": only(False),
    "verbose": only(False),
}
NEUTRAL_IN_GENERATE: Mapping[str, Neutral] = {
    **NEUTRAL,
    "context": only([]),
    "height": only(0),
    "steps": only(0),
    "template": only(""),
    "width": only(0),
}

#: Whether the model thinks, or how much: "low", "medium", "high".
Think: TypeAlias = bool | str


@json_type({"type": ["boolean", "string"]})
def _think(value: Any) -> Think:
    if not isinstance(value, bool | str) or value == "":
        raise MismatchError('true, false, or a level such as "high"')
    return value


@json_type(
    properties={
        "format": {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]},
    }
)
def _format(body: Mapping[str, Any]) -> Grammar | None:
    """Read ``format``: the word "json", or a JSON Schema."""
    given = body.get("format")
    if given is None or given == "":
        return None
    if given == "json":
        return Grammar("json_object", param="format")
    if not isinstance(given, dict):
        raise InvalidRequestError("'format' must be \"json\" or a JSON Schema.", param="format")
    return Grammar("json_schema", json.dumps(given), param="format")


@attrs.frozen(kw_only=True, slots=False)
class OllamaRequest(GenerationRequest):
    """What ``/api/chat`` and ``/api/generate`` have in common."""

    stream: bool = True
    grammar: Grammar | None = field(whole=_format)
    options: Options = attrs.field(factory=Options)
    think: Think | None = field(read=_think, default=None)
    shift: bool | None = None
    logprobs: bool = False
    top_logprobs: int | None = field(read=readers.integer_in(0, _MAX_TOP_LOGPROBS), default=None)
    chat_template_kwargs: dict[str, Any] = field(read=template_kwargs, factory=dict)

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token; one is the token that was chosen."""
        return max(1, self.top_logprobs or 0) if self.logprobs else 0

    @property
    def probs_field(self) -> str | None:
        """The field that says how many; None: it is the default."""
        return None if self.top_logprobs is None else "top_logprobs"

    @property
    def thinking_params(self) -> ChatParams:
        """What `think` and the variables of the template say of the prompt."""
        if self.think is None:
            return ChatParams(template_kwargs=self.chat_template_kwargs)
        kwargs = {**self.chat_template_kwargs, "enable_thinking": self.think is not False}
        if isinstance(self.think, str):
            kwargs["reasoning_effort"] = self.think
        if self.think:
            return ChatParams(template_kwargs=kwargs)
        # Where the template cannot switch thinking off, it ends as soon as it begins.
        return ChatParams(template_kwargs=kwargs, reasoning_budget=0, reasoning_message="")

    def given_params(self) -> dict[str, Any]:
        """The fields of `GenerationParams` and `SamplingParams` that the request sets."""
        return super().given_params() | self.options.params

    def check(self, server: Server) -> None:
        """Refuse what the model, or the server as it was started, cannot do.

        Raises:
            InvalidRequestError: naming the field.
        """
        self.options.check(server.model.n_ctx_seq)
        if self.think and not can_think(server.model.template):
            raise InvalidRequestError(
                f"'think' is not for this model: {server.model.info.name!r} does not support "
                "thinking.",
                param="think",
            )
        if self.shift is not None and self.shift != server.config.context_shift:
            raise InvalidRequestError(
                "'shift' is not supported with this value; the flag --context-shift sets it for "
                "all requests.",
                param="shift",
            )

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_fixed(body)
        request = structure(cls, body)
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequestError(
                "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs"
            )
        return request


@attrs.frozen(kw_only=True, slots=False)
class OllamaChatRequest(OllamaRequest):
    """``POST /api/chat``. Without messages it loads the model."""

    messages: Messages = field(read=read_messages, factory=Messages)
    continue_final_message: bool = field(whole=continues_final_message)
    tools: Tools = field(read=read_tools, factory=Tools)

    @property
    def chat_params(self) -> ChatParams:
        """What the prompt depends on, beside the messages, and what becomes of the output."""
        return attrs.evolve(
            self.thinking_params,
            tools=self.tools,
            add_generation_prompt=not self.continue_final_message,
            continue_final_message="auto" if self.continue_final_message else None,
            parse_tools=bool(self.tools),
        )

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, NEUTRAL)
        return super().parse(body)


@json_type()
def _messages(body: Mapping[str, Any]) -> Messages:
    """Make the chat that a prompt is, unless it is `raw` or has a `suffix`."""
    prompt, system = body.get("prompt") or "", body.get("system") or ""
    content = with_images(prompt, body.get("images") or (), "images")
    said = (("system", system), ("user", content))
    return Messages({"role": role, "content": each} for role, each in said if each)


@attrs.frozen(kw_only=True, slots=False)
class OllamaGenerateRequest(OllamaRequest):
    """``POST /api/generate``. Without a prompt it loads the model."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: tuple[str, ...] = ()
    messages: Messages = field(whole=_messages)

    @property
    def chat_params(self) -> ChatParams:
        """What the prompt depends on, beside the messages, and what becomes of the output."""
        return attrs.evolve(self.thinking_params, parse_tools=False)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, NEUTRAL_IN_GENERATE)
        request = super().parse(body)
        without_template = "raw" if request.raw else "suffix" if request.suffix else ""
        for name in ("suffix", "system", "think", "images") if without_template else ():
            if name != without_template and getattr(request, name):
                raise InvalidRequestError(
                    f"'{name}' does not go with '{without_template}'.", param=name
                )
        return request
