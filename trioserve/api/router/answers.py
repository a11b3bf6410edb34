"""The schemas of answers of a router's routes."""

from __future__ import annotations

from trioserve.api.base.fields import OBJECT, answer, or_null
from trioserve.api.base.old_answers import (
    COUNT,
    FIGURE,
    FLAG,
    TEXT,
    each,
    either,
    record,
    texts,
)

_STATUS = record(
    *("args", "pid", "last_used", "failed", "exit_code", "message", "log", "progress"),
    value=TEXT,
    args=each(TEXT),
    pid=COUNT,
    last_used=FIGURE,
    failed=FLAG,
    exit_code=COUNT,
    message=TEXT,
    log=each(TEXT),
    progress=either(FIGURE, OBJECT),
)
MODEL = answer(
    "ModelOfRouter",
    {
        **record(
            *("architecture", "is_toy", "example_prompts", "aliases", "tags", "source"),
            *("can_remove", "path", "size", "meta"),
            id=TEXT,
            object=texts("model"),
            owned_by=TEXT,
            created=COUNT,
            type=texts("model"),
            display_name=TEXT,
            created_at=TEXT,
            status=_STATUS,
            architecture=OBJECT,
            is_toy=FLAG,
            example_prompts=each(TEXT),
            aliases=each(TEXT),
            tags=each(TEXT),
            source=TEXT,
            can_remove=FLAG,
            path=TEXT,
            size=COUNT,
            meta=OBJECT,
        ),
        "additionalProperties": True,
    },
)
MODELS = answer(
    "ModelsOfRouter",
    record(
        object=texts("list"),
        data=each(MODEL),
        has_more=FLAG,
        first_id=or_null(TEXT),
        last_id=or_null(TEXT),
    ),
)
STARTED = answer("DownloadStarted", record(success=FLAG, model=TEXT))
