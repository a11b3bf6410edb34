"""The methods of `ModelServer` as an app calls them in another process.

Their annotations are the types of what is sent. What has no form in msgpack has another one here:
of arguments by their names, of results by their types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

import attrs
import msgspec
from msgspec import Raw, Struct

from trioserve.chat.params import ChatParams
from trioserve.errors import RateLimitError
from trioserve.model_process.messages import (
    MediaPart,
    Opened,
    PromptFacts,
    SentError,
    SentPrompt,
    Speaks,
    context_in,
    messages_in,
    prompt_in,
    prompts_in,
    sent_context,
    sent_prompt,
    sent_prompts,
)
from trioserve.server.context import RequestContext
from trioserve.server.keywords import only_chat, only_context
from trioserve.server.limits.rates import Counted, Remaining
from trioserve.server.model_server import ModelServer
from trioserve.types import Prompt


def _same(value: Any) -> Any:
    return value


@attrs.frozen
class Form:
    """The form of a value that is sent: its type, its writer and its reader."""

    type: Any
    write: Callable[[Any], Any] = _same
    read: Callable[[Any], Any] = _same


def _plain(chat: ChatParams) -> ChatParams:
    """Make dicts and lists of what a program may have given as other types."""
    tools = None if chat.tools is None else [dict(each) for each in chat.tools]
    return attrs.evolve(chat, tools=tools, template_kwargs=dict(chat.template_kwargs))


def _pairs(biases: Any) -> Any:
    return [*biases.items()] if isinstance(biases, Mapping) else biases


def as_tuples(sent: Any) -> Any:
    """Make tuples of lists, as pairs of biases are."""
    return tuple(map(as_tuples, sent)) if isinstance(sent, list) else sent


def _tokens(value: Any) -> Any:
    return PromptFacts.of(value) if isinstance(value, Prompt) else value


def _tokens_in(sent: Any) -> Any:
    return sent.prompt if isinstance(sent, PromptFacts) else sent


_ARGUMENTS = {
    "prompts": Form(list[SentPrompt], sent_prompts, prompts_in),
    "inputs": Form(str | list[SentPrompt], sent_prompts, prompts_in),
    "prompt": Form(SentPrompt, sent_prompt, prompt_in),
    "tokens": Form(list[int] | PromptFacts, _tokens, _tokens_in),
    "messages": Form(list[dict[str, Any]], list, messages_in),
    "context": Form(RequestContext, sent_context, context_in),
    "chat": Form(ChatParams, _plain),
    "source": Form(MediaPart, MediaPart.of, lambda sent: sent.source),
    "biases": Form(Any, _pairs, as_tuples),
}


class _CountedFacts(Struct, frozen=True):
    left: dict[str, Remaining]
    error: SentError | None

    @classmethod
    def of(cls, counted: Counted) -> _CountedFacts:
        error = None if counted.error is None else SentError.of(counted.error)
        return cls(dict(counted.left()), error)

    @property
    def counted(self) -> Counted:
        error = None if self.error is None else self.error.error
        return Counted(lambda: self.left, error if isinstance(error, RateLimitError) else None)


_RESULTS: dict[Any, Form] = {
    Prompt: Form(PromptFacts, PromptFacts.of, lambda facts: facts.prompt),
    Counted: Form(_CountedFacts, _CountedFacts.of, lambda facts: facts.counted),
}

#: The answers of methods whose result lasts, as a stream does.
_LASTING = {
    ModelServer.stream_all: Opened,
    ModelServer.open_chats: Opened,
    ModelServer.transcribing: float,
    ModelServer.speaking: Speaks,
    ModelServer.loaded: None,
}

#: Methods after which the adapters are sent again.
_OF_ADAPTERS = {ModelServer.set_scales, ModelServer.load_adapter, ModelServer.unload_adapter}


class Question:
    """A method, as it is called from another process.

    Attributes:
        name: of the method.
        lasts: whether its result lasts until the call is cancelled.
        adapts: whether it changes the LoRA adapters.
        result: its form, or that of the facts about a result that lasts.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.name = method.__name__
        self.lasts, self.adapts = method in _LASTING, method in _OF_ADAPTERS
        self._signature = inspect.signature(method)
        hints = get_type_hints(method)
        kinds = self._signature.parameters.values()
        names = [each.name for each in kinds if each.kind is not each.VAR_KEYWORD][1:]
        self._has_fields = len(names) + 1 < len(kinds)
        self._forms = {each: _ARGUMENTS.get(each, Form(hints[each])) for each in names}
        fields = [(each, form.type) for each, form in self._forms.items()]
        self._fields = msgspec.defstruct(self.name, fields, array_like=True)
        gives = _LASTING[method] if self.lasts else hints["return"]
        self.result = _RESULTS.get(gives, Form(gives))

    def ask(self, *args: Any, **kwargs: Any) -> Struct:
        """Write the arguments of a call, in the app."""
        bound = self._signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if self._has_fields and (fields := given.get("fields")):
            if "context" in given:
                given["context"] = only_context(fields, given["context"])
            else:
                given["chat"] = only_chat(fields, given["chat"])
        return self._fields(*(form.write(given[each]) for each, form in self._forms.items()))

    def read(self, fields: Raw) -> dict[str, Any]:
        """Read the arguments of a call, in the process."""
        given = msgspec.msgpack.decode(fields, type=self._fields)
        return {each: form.read(getattr(given, each)) for each, form in self._forms.items()}


@cache
def question_of(method: Callable[..., Any]) -> Question:
    """Make the question of a method of `ModelServer`."""
    return Question(method)


@cache
def question_named(name: str) -> Question:
    """Find the question of a name that an app has sent."""
    return question_of(getattr(ModelServer, name))
