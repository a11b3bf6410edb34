"""The intended differences between trioserve and llama-server.

The ones without a reason are ids, times, and what names the program itself.
"""

from __future__ import annotations

from typing import Any

from tests.compat.diff import MISSING, Known, only_ours, only_theirs, same_stripped

#: Fields that depend on the chosen tokens.
_OUTPUT = (
    r".*/(text|content|reasoning_content|tokens|logprobs|completion_probabilities|predicted_n|"
    r"tokens_predicted|tokens_cached|finish_reason|stop_type|stopping_word|has_new_line|message|"
    r"truncated)(/.*)?"
)


def _is_part_of_ours(ours: Any, theirs: Any) -> bool:
    """True if llama-server has some of our tokens, in their order."""
    if not isinstance(ours, list):
        return False
    if theirs is MISSING:
        return True
    left = iter([_id(each) for each in ours])
    return isinstance(theirs, list) and all(_id(each) in left for each in theirs)


def _id(token: Any) -> Any:
    return token["id"] if isinstance(token, dict) else token


def _is_error(_ours: Any, theirs: Any) -> bool:
    """True if llama-server has an error where we have an answer."""
    return theirs is MISSING or theirs in (400, 500) or isinstance(theirs, dict | list)


def _is_cut(ours: Any, theirs: Any) -> bool:
    return isinstance(ours, str) and "\ufffd" in ours and str(theirs) == ours[: len(str(theirs))]


def _is_marker(ours: Any, theirs: Any) -> bool:
    return ours == "" and isinstance(theirs, str) and theirs.strip() == "<think>"


KNOWN: tuple[Known, ...] = (
    # -- ids, times and names
    Known("", r".*/(id|created|system_fingerprint|build_info|owned_by)"),
    Known("", r".*/timings/(prompt|predicted)_(ms|per_token_ms|per_second)"),
    Known("", r".*/prompt_progress/(time_ms|processed)"),
    Known("", r".*/id_slot"),
    # -- errors
    Known("the words of an error", r"/body/error/message"),
    Known("an error names the field at fault, as OpenAI's do", r"/body/error/param"),
    Known(
        "a body that is no JSON is a 400, not a 500",
        r"/status|/body/error/(code|type)",
        kind=r"not JSON|not UTF-8|no body",
    ),
    Known(
        "a route that has other methods answers 405, not 404",
        r"/status|/body/error/(code|type)",
        kind=r"wrong method",
    ),
    Known(
        "an image for a model that sees none is a 400, not a 500",
        r"/status|/body/error/(code|type)",
        kind=r"an image",
    ),
    Known("a prompt without tokens is a 400, not an empty answer", r".*", kind=r"empty prompt"),
    Known(
        "a prompt that does not fit has OpenAI's error code",
        r"/body/error/code",
        kind=r"prompt too long",
    ),
    Known(
        "a slot that there is not is a 400, and not any other slot",
        r".*",
        kind=r"bad id_slot",
    ),
    Known(
        "a message without a role is a 400, not a 500",
        r"/status|/body/error/(code|type)",
        kind=r"no role",
    ),
    # -- streams
    Known(
        "with include_usage, one usage for all outputs, in a separate chunk",
        r"/stream/(outputs/\d+/last/usage|rest.*)",
        kind=r"v1/completions|chat",
    ),
    Known(
        "an event without text is not sent",
        r"/stream/outputs/\d+/(part|first|has_timings_on_the_way)(/.*)?",
        when=only_theirs,
    ),
    Known(
        "in a chat's stream, llama-server drops the logprobs of tokens without text",
        r"/stream/outputs/\d+/logprobs.*",
        kind=r"chat",
        when=_is_part_of_ours,
    ),
    Known(
        "llama-server leaves out tokens that are only a part of a character",
        r".*/(tokens|completion_probabilities|logprobs|logprobs/content)",
        when=_is_part_of_ours,
    ),
    # -- several outputs
    Known(
        "outputs that are computed side by side round differently, on either server",
        _OUTPUT,
        several=True,
    ),
    Known("usage counts all outputs", r"/body/usage/.*"),
    # -- text
    Known(
        "blanks beside the markers of reasoning belong to neither part",
        r".*/(reasoning_content|content)",
        kind=r"chat",
        when=same_stripped,
    ),
    Known(
        "half of a character at the end of an output becomes U+FFFD",
        r".*/(reasoning_content|content|text)",
        when=_is_cut,
    ),
    Known(
        "a marker of reasoning is no content, when the output ends with it",
        r".*/content",
        when=_is_marker,
    ),
    Known(
        "n_indent ends an output before the line at fault, in streams too",
        _OUTPUT,
        fields=("n_indent",),
    ),
    Known(
        "a grammar holds from where the reasoning ends",
        r".*/(content|reasoning_content|finish_reason|predicted_n|logprobs)(/.*)?",
        kind=r"chat",
        fields=("grammar",),
    ),
    Known(
        "the tokens of logprobs are those that were chosen, also where a stop string takes "
        "their text",
        r".*/(completion_probabilities|logprobs)(/.*)?",
        fields=("stop",),
    ),
    Known(
        "ignore_eos does not go beyond the end of a grammar, where llama-server has a 500",
        r".*",
        fields=("ignore_eos", "grammar"),
    ),
    *(
        Known(
            "ignore_eos does not go beyond the end of a schema, where llama-server has a 500",
            r".*",
            fields=("ignore_eos", name),
            when=_is_error,
        )
        for name in ("json_schema", "response_format")
    ),
    Known(
        "an answer that is begun may be bound to a schema",
        r"/status|/stream|/body(/.*)?",
        kind=r"chat",
        fields=("response_format",),
        when=_is_error,
    ),
    *(
        Known(
            "a schema leaves room, and another library reads it: blanks, other properties, "
            "digits, and in chats no fence around the JSON",
            _OUTPUT,
            fields=(name,),
        )
        for name in ("json_schema", "response_format")
    ),
    Known(
        "logprobs are streamed with tools, too",
        r"/status|/body|/stream",
        kind=r"chat",
        fields=("tools", "stream", "logprobs"),
    ),
    Known(
        "what begins like a tool call, and is cut short, is content",
        r".*/content",
        kind=r"chat",
        fields=("tools",),
        when=lambda ours, _: str(ours).startswith("<tool_call>"),
    ),
    Known(
        "a call that is cut short has what is certain of its arguments, and no content",
        r".*/(content|arguments)",
        kind=r"chat",
        fields=("tools",),
        when=lambda ours, theirs: str(theirs).startswith(ours or ""),
    ),
    Known(
        "reasoning that the prompt has ended is not repeated in the content",
        r".*/content",
        kind=r"chat",
        fields=("reasoning_format",),
        when=lambda ours, theirs: str(theirs) == f"<think>\n\n</think>\n\n{ours}",
    ),
    Known(
        "response_fields that are no list are a 400",
        r".*",
        kind=r"bad response_fields",
    ),
    Known(
        "n_predict 0 makes no token, as llama-server's documentation has it",
        r".*/(content|tokens_predicted|predicted_n|stop_type)",
        kind=r"no tokens wanted",
    ),
    Known(
        "generation_settings has the schema, not a grammar that was made of it",
        r".*/generation_settings/grammar",
        fields=("json_schema",),
    ),
    Known(
        "candidates that are nearly equal may change places",
        r".*/top_logprobs/[1-9]\d*/(id|token|bytes)(/.*)?",
    ),
    # -- additions
    Known(
        "OpenAI's own form of logprobs, beside llama-server's",
        r".*/logprobs/(refusal|tokens|token_logprobs|top_logprobs|text_offset)",
        when=only_ours,
    ),
    Known("the marker of media is another one in each process", r"/body/media_marker"),
    Known("what a model takes is in the list, as llama-server's router has it", r".*/architecture"),
    Known(
        "capabilities are found by rendering chats; some have no name in llama-server",
        r"/body/chat_template_caps/.*",
        kind=r"/props",
    ),
)
