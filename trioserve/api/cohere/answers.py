"""The schemas of answers of Cohere's routes."""

from __future__ import annotations

from trioserve.api.base.fields import answer
from trioserve.api.base.old_answers import COUNT, FIGURE, FLAG, TEXT, each, record, texts

_META = record(
    api_version=record(version=TEXT, is_experimental=FLAG),
    billed_units=record("search_units", search_units=COUNT, input_tokens=COUNT),
)
RANKING = answer(
    "CohereRanking",
    record(
        id=TEXT,
        results=each(
            record("document", index=COUNT, relevance_score=FIGURE, document=record(text=TEXT))
        ),
        meta=_META,
    ),
)
EMBEDDINGS = answer(
    "CohereEmbeddings",
    record(
        "texts",
        id=TEXT,
        response_type=texts("embeddings_by_type"),
        embeddings=record(
            *("float", "base64", "binary", "ubinary"),
            float=each(each(FIGURE)),
            base64=each(TEXT),
            binary=each(each(COUNT)),
            ubinary=each(each(COUNT)),
        ),
        texts=each(TEXT),
        meta=_META,
    ),
)
