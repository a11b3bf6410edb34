"""The schemas of answers of vLLM's routes."""

from __future__ import annotations

from trioserve.api.base.fields import Schema, answer, or_null
from trioserve.api.base.old_answers import COUNT, FIGURE, FLAG, NULL, TEXT, each, record, texts


def _list(entry: Schema) -> Schema:
    return record(
        id=TEXT,
        object=texts("list"),
        created=COUNT,
        model=TEXT,
        data=each(entry),
        usage=record(
            prompt_tokens=COUNT,
            total_tokens=COUNT,
            completion_tokens=COUNT,
            prompt_tokens_details=NULL,
        ),
    )


SCORES = answer("Scores", _list(record(index=COUNT, object=texts("score"), score=FIGURE)))
CLASSES = answer(
    "Classes",
    _list(record(index=COUNT, label=or_null(TEXT), probs=each(FIGURE), num_classes=COUNT)),
)
TOKENIZER = answer(
    "TokenizerInfo",
    record(
        tokenizer_class=TEXT,
        bos_token=or_null(TEXT),
        eos_token=or_null(TEXT),
        add_bos_token=FLAG,
        model_max_length=COUNT,
        chat_template=or_null(TEXT),
    ),
)
