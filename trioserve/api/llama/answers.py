"""The schemas of answers of llama-server's routes, and of those about the server."""

from __future__ import annotations

from trioserve.api.base.fields import OBJECT, answer, or_null
from trioserve.api.base.old_answers import (
    ARCHITECTURE,
    COUNT,
    FIGURE,
    FLAG,
    GUIDANCE,
    OUTPUT,
    PROMPT_USAGE,
    SETTINGS,
    TEXT,
    each,
    either,
    record,
    texts,
)

OUTPUTS = either(OUTPUT, each(OUTPUT))
TOKENS = answer(
    "Tokens",
    record(
        *("count", "max_model_len", "token_strs"),
        tokens=either(each(COUNT), each(record(id=COUNT, piece=either(TEXT, each(COUNT))))),
        count=COUNT,
        max_model_len=COUNT,
        token_strs=each(TEXT),
    ),
)
CONTENT = answer("Content", record(content=TEXT, prompt=TEXT))
PROMPT = answer("PromptOfChat", record(prompt=TEXT))

_NUMBERS = ("vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size")
#: A model, or one of its LoRA adapters, which has only its names.
MODEL = answer(
    "Model",
    record(
        *("aliases", "tags", "architecture", "meta", "root", "parent", *GUIDANCE),
        id=TEXT,
        object=texts("model"),
        created=COUNT,
        owned_by=TEXT,
        aliases=each(TEXT),
        tags=each(TEXT),
        architecture=ARCHITECTURE,
        meta=record(**dict.fromkeys(_NUMBERS, COUNT), ftype=TEXT),
        root=TEXT,
        parent=or_null(TEXT),
        **GUIDANCE,
    ),
)
MODELS = answer("ModelList", record(object=texts("list"), data=each(MODEL), models=each(OBJECT)))

_SLOT = answer(
    "Slot",
    record(
        *("id_task", "n_prompt_tokens", "n_prompt_tokens_processed", "n_prompt_tokens_cache"),
        *("params", "next_token"),
        id=COUNT,
        n_ctx=COUNT,
        speculative=FLAG,
        is_processing=FLAG,
        state=TEXT,
        paused=FLAG,
        encoding=FLAG,
        id_task=COUNT,
        n_prompt_tokens=COUNT,
        n_prompt_tokens_processed=COUNT,
        n_prompt_tokens_cache=COUNT,
        params=SETTINGS,
        next_token=each(
            record(
                *("has_new_line", "n_remain"),
                has_next_token=FLAG,
                has_new_line=FLAG,
                n_remain=COUNT,
                n_decoded=COUNT,
            )
        ),
    ),
)
_WAITING = record(
    id_task=COUNT,
    position=COUNT,
    n_prompt_tokens=COUNT,
    priority=COUNT,
    waited_s=FIGURE,
    wait_s=or_null(FIGURE),
)
_CACHE = ("kv_bytes", "ram_bytes", "disk_bytes", "ram_tokens", "disk_tokens")
SLOTS = either(
    each(_SLOT),
    answer(
        "SlotsAndQueue",
        record(
            slots=each(_SLOT),
            queue=each(_WAITING),
            kv_cache=record(cells=COUNT, used=COUNT, copied=COUNT),
            cache=record(
                **dict.fromkeys((*_CACHE, "disk_read_bytes", "disk_written_bytes"), COUNT)
            ),
            totals=record(prompt_tokens=COUNT, cached_tokens=COUNT, generated_tokens=COUNT),
            drafts=each(record(type=TEXT, checked=COUNT, tokens=COUNT, accepted=COUNT)),
        ),
    ),
)
_MOVED = ("n_erased", "n_saved", "n_written", "n_restored", "n_read")
MOVED = answer(
    "SlotAction",
    record(
        *_MOVED,
        *("filename", "timings"),
        id_slot=COUNT,
        filename=TEXT,
        timings=record("save_ms", "restore_ms", save_ms=FIGURE, restore_ms=FIGURE),
        **dict.fromkeys(_MOVED, COUNT),
    ),
)
ADAPTERS = answer(
    "Adapters",
    each(record(id=COUNT, name=TEXT, path=TEXT, scale=FIGURE, task_name=TEXT, prompt_prefix=TEXT)),
)
RANKING = either(
    answer(
        "Ranking",
        record(
            model=TEXT,
            object=texts("list"),
            usage=PROMPT_USAGE,
            results=each(
                record("document", index=COUNT, relevance_score=FIGURE, document=record(text=TEXT))
            ),
        ),
    ),
    each(record("text", index=COUNT, score=FIGURE, text=TEXT)),
)
