"""The schemas of answers of OpenAI's routes."""

from __future__ import annotations

from trioserve.api.base.fields import OBJECT, answer, or_null
from trioserve.api.base.old_answers import (
    COUNT,
    FIGURE,
    FLAG,
    NULL,
    PROMPT_USAGE,
    TEXT,
    TOKEN_PROBS,
    each,
    either,
    record,
    texts,
)

# -- embeddings

EMBEDDINGS = answer(
    "EmbeddingList",
    record(
        model=TEXT,
        object=texts("list"),
        usage=PROMPT_USAGE,
        data=each(
            record(
                "encoding_format",
                index=COUNT,
                object=texts("embedding"),
                embedding=either(each(FIGURE), TEXT),
                encoding_format=TEXT,
            )
        ),
    ),
)
#: llama-server's form: a row for each text, or for each of its tokens.
MATRICES = answer("Matrices", each(record(index=COUNT, embedding=each(each(FIGURE)))))

# -- recordings

_SEGMENT = record(
    id=COUNT,
    seek=COUNT,
    start=FIGURE,
    end=FIGURE,
    text=TEXT,
    tokens=each(COUNT),
    temperature=FIGURE,
    avg_logprob=FIGURE,
    compression_ratio=FIGURE,
    no_speech_prob=FIGURE,
)
_TOKENS = record(
    type=texts("tokens"),
    input_tokens=COUNT,
    input_token_details=record(text_tokens=COUNT, audio_tokens=COUNT),
    output_tokens=COUNT,
    total_tokens=COUNT,
)
TRANSCRIPT = answer(
    "Transcript",
    record(
        *("logprobs", "task", "language", "duration", "words", "segments"),
        text=TEXT,
        usage=either(_TOKENS, record(type=texts("duration"), seconds=COUNT)),
        logprobs=each(record(token=TEXT, bytes=each(COUNT), logprob=FIGURE)),
        task=TEXT,
        language=TEXT,
        duration=FIGURE,
        words=each(record(word=TEXT, start=FIGURE, end=FIGURE)),
        segments=each(_SEGMENT),
    ),
)

# -- the Responses API

_PART = record(
    *("annotations", "logprobs"),
    type=texts("output_text", "reasoning_text"),
    text=TEXT,
    annotations=each(OBJECT),
    logprobs=each(TOKEN_PROBS),
)
#: An item of any type. The types of calls have the fields of OpenAI's SDK.
_ITEM = answer(
    "ResponseItem",
    {
        **record(
            *("role", "content", "call_id", "name", "arguments", "input"),
            id=TEXT,
            type=TEXT,
            status=TEXT,
            role=TEXT,
            content=each(_PART),
            call_id=TEXT,
            name=TEXT,
            arguments=either(TEXT, OBJECT),
            input=TEXT,
        ),
        "additionalProperties": True,
    },
)
#: What some responses do not have: a queued one, and one that is not stored.
_OF_STARTED = (
    "conversation",
    "frequency_penalty",
    "max_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "text",
    "top_logprobs",
    "truncation",
)
RESPONSE = answer(
    "Response",
    record(
        *_OF_STARTED,
        id=TEXT,
        object=texts("response"),
        created_at=COUNT,
        completed_at=or_null(COUNT),
        model=TEXT,
        status=TEXT,
        output=each(_ITEM),
        error=or_null(record(code=TEXT, message=TEXT)),
        incomplete_details=or_null(record(reason=TEXT)),
        usage=or_null(
            record(
                input_tokens=COUNT,
                input_tokens_details=record(cached_tokens=COUNT, cache_write_tokens=COUNT),
                output_tokens=COUNT,
                output_tokens_details=record(reasoning_tokens=COUNT),
                total_tokens=COUNT,
            )
        ),
        background=FLAG,
        frequency_penalty=FIGURE,
        instructions=or_null(TEXT),
        max_output_tokens=or_null(COUNT),
        max_tool_calls=or_null(COUNT),
        metadata=or_null({"type": "object", "additionalProperties": TEXT}),
        conversation=or_null(record(id=TEXT)),
        parallel_tool_calls=FLAG,
        presence_penalty=FIGURE,
        previous_response_id=or_null(TEXT),
        prompt_cache_key=or_null(TEXT),
        reasoning=record(effort=or_null(TEXT), summary=NULL),
        safety_identifier=or_null(TEXT),
        service_tier=TEXT,
        store=FLAG,
        temperature=or_null(FIGURE),
        text=OBJECT,
        tool_choice=either(TEXT, OBJECT),
        tools=each(OBJECT),
        top_logprobs=COUNT,
        top_p=or_null(FIGURE),
        truncation=TEXT,
        user=or_null(TEXT),
    ),
)
