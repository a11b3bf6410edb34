"""Fields that clients know and that have no effect here: which are refused, and which are taken.

A field without effect is refused, unless its value asks for what happens anyway, or nobody could
tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from trioserve.errors import UnsupportedFieldError

Neutral: TypeAlias = Callable[[Any], bool]


def only(*values: Any) -> Neutral:
    """Accept these values. True and 1 differ, as in JSON."""
    return lambda value: any(value == each and type(value) is type(each) for each in values)


#: Known fields without effect, and which of their values change nothing. Null never does.
NEUTRAL: Mapping[str, Neutral] = {
    "adapters": only([]),
    "audio": only(),
    "backend_sampling": only(False),
    "function_call": only("auto", "none"),
    "functions": only([]),
    "grammar_lazy": only(False),
    "grammar_triggers": only([]),
    "image_data": only([]),
    "modalities": only(["text"]),
    "moderation": only(),
    "n_cache_reuse": only(0),
    "parallel_tool_calls": only(True),
    "preserved_tokens": only([]),
    "reasoning_budget_tokens": only(-1),
    "reasoning_control": only(False),
    "thinking_budget_tokens": only(-1),
    "trioserve_run_tools": only(False),
    "web_search_options": only(),
}

#: Those that do have an effect on a chat, whose template tells where reasoning and calls are.
_OF_CHATS = frozenset(
    {
        "parallel_tool_calls",
        "reasoning_budget_tokens",
        "reasoning_control",
        "thinking_budget_tokens",
        "trioserve_run_tools",
    }
)

#: The same, where a route differs.
NEUTRAL_IN_LLAMA: Mapping[str, Neutral] = {
    **NEUTRAL,
    "best_of": only(1),
    "echo": only(False),
    "suffix": only(""),
}
NEUTRAL_IN_CHAT: Mapping[str, Neutral] = {
    **{name: neutral for name, neutral in NEUTRAL.items() if name not in _OF_CHATS},
    "best_of": only(1),
    "suffix": only(""),
}


#: Known fields that are taken without effect, because one machine with one model has no use for
#: them: what they are for, by name. None of them changes what an answer should say.
ACCEPTED: Mapping[str, str] = {
    "metadata": "labels of stored answers; nothing is stored",
    "model": "there is one model, and answers have its name",
    "prediction": "expected text that would speed up the answer; the answer is the same without",
    "prompt_cache_key": "the cache finds prompts by their tokens",
    "prompt_cache_options": "the cache has flags of its own",
    "prompt_cache_retention": "the cache keeps what fits",
    "safety_identifier": "identifies an end user to a provider",
    "service_tier": "there is one tier",
    "store": "nothing is stored",
    "user": "like safety_identifier",
}


def refuse_unsupported(
    body: Mapping[str, Any], neutral: Mapping[str, Neutral], path: str = ""
) -> None:
    """Refuse fields that would be without effect; `path` stands before their names in errors.

    Raises:
        UnsupportedFieldError: naming the first one.
    """
    for name, is_neutral in neutral.items():
        value = body.get(name)
        if value is not None and not is_neutral(value):
            raise UnsupportedFieldError(
                f"'{path}{name}' is not supported with this value; leave it out.",
                param=f"{path}{name}",
            )
