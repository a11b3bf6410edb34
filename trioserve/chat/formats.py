"""How models write reasoning and tool calls, as data.

A format says which markers surround what. `detect` chooses one by what the model's chat template
mentions. The order of `KNOWN` decides when several would fit, so special ones come first.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Reasoning:
    """Reasoning comes first, between two markers. The first may be part of the prompt."""

    start: str
    end: str


@attrs.frozen(kw_only=True)
class JsonCall:
    """A call as one JSON object, such as ``{"name": "f", "arguments": {…}}``.

    Members that are in none of the fields make it no call.
    """

    name_keys: tuple[str, ...] = ("name",)
    arguments_keys: tuple[str, ...] = ("arguments",)
    ignored_keys: tuple[str, ...] = ()  # members that say nothing a client needs


#: The ways to write a call. Further ones get a class here and a reader in `calls`.
CallSyntax = JsonCall


@attrs.frozen(kw_only=True)
class ToolCalls:
    """Each call stands between two markers; there may be several, with whitespace between."""

    start: str
    end: str
    syntax: CallSyntax


@attrs.frozen(kw_only=True)
class ChatFormat:
    """How a family of models writes its messages."""

    name: str
    reasoning: Reasoning | None = None
    tool_calls: ToolCalls | None = None


@attrs.frozen(kw_only=True)
class Signature:
    """What a template must mention, and must not, to be of a format."""

    format: ChatFormat
    mentions: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def fits(self, source: str) -> bool:
        """Whether a template has this signature."""
        return all(text in source for text in self.mentions) and not any(
            text in source for text in self.lacks
        )


THINK = Reasoning("<think>", "</think>")
HERMES_CALLS = ToolCalls(
    start="<tool_call>",
    end="</tool_call>",
    syntax=JsonCall(ignored_keys=("type", "id")),
)

HERMES_THINK = ChatFormat(name="hermes-think", reasoning=THINK, tool_calls=HERMES_CALLS)
HERMES = ChatFormat(name="hermes", tool_calls=HERMES_CALLS)
PLAIN_THINK = ChatFormat(name="plain-think", reasoning=THINK)
PLAIN = ChatFormat(name="plain")

#: Templates with these write calls in ``<tool_call>`` too, but not as JSON.
_OTHER_CALLS = ("<function=", "<arg_key>", "<parameter=", "<invoke")

KNOWN: tuple[Signature, ...] = (
    Signature(format=HERMES_THINK, mentions=("<tool_call>", "</think>"), lacks=_OTHER_CALLS),
    Signature(format=HERMES, mentions=("<tool_call>",), lacks=_OTHER_CALLS),
    Signature(format=PLAIN_THINK, mentions=("</think>",)),
    Signature(format=PLAIN),
)


def detect(source: str) -> ChatFormat:
    """Choose the format of a model by the source of its chat template."""
    return next(signature.format for signature in KNOWN if signature.fits(source))
