"""The schemas of answers about what outlives a connection."""

from __future__ import annotations

from trioserve.api.base.fields import Schema, answer, or_null
from trioserve.api.base.old_answers import COUNT, FIGURE, FLAG, TEXT, each, record, texts
from trioserve.api.batches import TIMES

_METADATA: Schema = {"type": "object", "additionalProperties": TEXT}

#: An item of the input or output. Its other fields are those that its type has at OpenAI.
ITEM = answer(
    "StoredItem",
    {**record(id=TEXT, type=TEXT, status=TEXT), "additionalProperties": True},
)
DELETED = answer("DeletedRecord", record(id=TEXT, object=TEXT, deleted=FLAG))
CONVERSATION = answer(
    "Conversation",
    record(id=TEXT, object=texts("conversation"), created_at=COUNT, metadata=_METADATA),
)
FILE = answer(
    "File",
    record(
        id=TEXT,
        object=texts("file"),
        bytes=COUNT,
        created_at=COUNT,
        expires_at=or_null(COUNT),
        filename=TEXT,
        purpose=TEXT,
        status=TEXT,
        status_details=or_null(TEXT),
    ),
)
_ERROR = record(code=TEXT, line=or_null(COUNT), message=TEXT, param=or_null(TEXT))
BATCH = answer(
    "Batch",
    record(
        id=TEXT,
        object=texts("batch"),
        endpoint=TEXT,
        errors=or_null(record(object=texts("list"), data=each(_ERROR))),
        input_file_id=TEXT,
        completion_window=TEXT,
        status=TEXT,
        output_file_id=or_null(TEXT),
        error_file_id=or_null(TEXT),
        created_at=COUNT,
        **{f"{name}_at": or_null(COUNT) for name in TIMES},
        request_counts=record(total=COUNT, completed=COUNT, failed=COUNT),
        metadata=_METADATA,
    ),
)


#: Usage, summed: what it is not summed by is null.
_USED = record(
    id=TEXT,
    day=or_null(TEXT),
    key=or_null(TEXT),
    model=or_null(TEXT),
    requests=COUNT,
    input_tokens=COUNT,
    cached_input_tokens=COUNT,
    output_tokens=COUNT,
    seconds=FIGURE,
)


def _page(name: str, entry: Schema, **more: Schema) -> Schema:
    return answer(
        name,
        record(
            object=texts("list"),
            **more,
            data=each(entry),
            first_id=or_null(TEXT),
            last_id=or_null(TEXT),
            has_more=FLAG,
        ),
    )


USAGE_PAGE = _page("UsagePage", _USED, start=TEXT, end=TEXT)
ITEMS = _page("StoredItems", ITEM)
FILES = _page("Files", FILE)
BATCHES = _page("Batches", BATCH)
