"""The schemas of answers of Ollama's routes."""

from __future__ import annotations

from trioserve.api.base.fields import OBJECT, answer
from trioserve.api.base.old_answers import (
    COUNT,
    FIGURE,
    FLAG,
    TEXT,
    TOKEN_PROBS,
    each,
    record,
    texts,
)

_TIMES = {
    "total_duration": COUNT,
    "load_duration": COUNT,
    "prompt_eval_count": COUNT,
    "prompt_eval_duration": COUNT,
    "eval_count": COUNT,
    "eval_duration": COUNT,
}
_WHOLE = {
    "model": TEXT,
    "created_at": TEXT,
    "done": FLAG,
    "done_reason": TEXT,
    "logprobs": each(TOKEN_PROBS),
    **_TIMES,
}
_CALL = record(id=TEXT, function=record(name=TEXT, arguments=OBJECT))
CHAT = answer(
    "OllamaChat",
    record(
        *_TIMES,
        "logprobs",
        message=record(
            *("thinking", "tool_calls"),
            role=texts("assistant"),
            content=TEXT,
            thinking=TEXT,
            tool_calls=each(_CALL),
        ),
        **_WHOLE,
    ),
)
GENERATED = answer(
    "OllamaGenerated",
    record(*_TIMES, *("logprobs", "thinking"), response=TEXT, thinking=TEXT, **_WHOLE),
)
EMBED = answer(
    "OllamaEmbeddings",
    record(
        model=TEXT,
        total_duration=COUNT,
        load_duration=COUNT,
        prompt_eval_count=COUNT,
        embeddings=each(each(FIGURE)),
    ),
)
EMBEDDING = answer("OllamaEmbedding", record(embedding=each(FIGURE)))

_DETAILS = record(
    parent_model=TEXT,
    format=TEXT,
    family=TEXT,
    families=each(TEXT),
    parameter_size=TEXT,
    quantization_level=TEXT,
)
_MODEL = {"name": TEXT, "model": TEXT, "size": COUNT, "digest": TEXT, "details": _DETAILS}
TAGS = answer("OllamaModels", record(models=each(record(**_MODEL, modified_at=TEXT))))
PROCESSES = answer(
    "OllamaProcesses",
    record(
        models=each(
            record("size_vram", **_MODEL, expires_at=TEXT, context_length=COUNT, size_vram=COUNT)
        )
    ),
)
SHOWN = answer(
    "OllamaModel",
    record(
        license=TEXT,
        modelfile=TEXT,
        parameters=TEXT,
        template=TEXT,
        details=_DETAILS,
        model_info=OBJECT,
        capabilities=each(TEXT),
        modified_at=TEXT,
    ),
)
VERSION = answer("OllamaVersion", record(version=TEXT, trioserve=TEXT))
STATUS = answer("OllamaStatus", record(status=TEXT))
