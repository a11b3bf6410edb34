"""The schemas of answers of Anthropic's routes."""

from __future__ import annotations

from trioserve.api.base.fields import OBJECT, answer, or_null
from trioserve.api.base.old_answers import COUNT, NULL, TEXT, each, record, texts

_BLOCK = answer(
    "ContentBlock",
    record(
        *("text", "citations", "thinking", "signature", "id", "name", "input", "caller"),
        type=texts("text", "thinking", "tool_use"),
        text=TEXT,
        citations=NULL,
        thinking=TEXT,
        signature=TEXT,
        id=TEXT,
        name=TEXT,
        input=OBJECT,
        caller=record(type=TEXT),
    ),
)
MESSAGE = answer(
    "Message",
    record(
        id=TEXT,
        type=texts("message"),
        role=texts("assistant"),
        model=TEXT,
        content=each(_BLOCK),
        stop_reason=or_null(TEXT),
        stop_sequence=or_null(TEXT),
        stop_details=NULL,
        container=NULL,
        usage=record(
            input_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
            cache_read_input_tokens=COUNT,
            cache_creation=NULL,
            output_tokens=COUNT,
            output_tokens_details=NULL,
            server_tool_use=NULL,
            inference_geo=NULL,
            service_tier=TEXT,
        ),
    ),
)
