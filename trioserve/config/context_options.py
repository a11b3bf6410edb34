"""`ContextOptions`: slots, the KV cache, threads, and how ticks are shared.

They are a part of `trioserve.config.Config`. The names are llama-server's where it has them.
"""

from __future__ import annotations

import attrs

from trioserve.config.option import option

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@attrs.frozen(kw_only=True, slots=False)  # `Config` has several such bases
class ContextOptions:
    """What there is to compute with, and for whom."""

    ctx_size: int = option(
        0,
        "-c",
        "--ctx-size",
        group="Context and threads",
        env="LLAMA_ARG_CTX_SIZE",
        least=0,
        most=2**31 - 1,
        help="tokens in the KV cache, all slots together; 0: the model's training context",
    )
    parallel: int = option(
        4,
        "-np",
        "--parallel",
        group="Context and threads",
        env="LLAMA_ARG_N_PARALLEL",
        least=1,
        most=256,
        help="slots: requests that run at the same time",
    )
    batch_size: int = option(
        2048,
        "-b",
        "--batch-size",
        group="Context and threads",
        env="LLAMA_ARG_BATCH",
        least=1,
        most=2**20,
        help="most tokens in one tick",
    )
    ubatch_size: int = option(
        512,
        "-ub",
        "--ubatch-size",
        group="Context and threads",
        env="LLAMA_ARG_UBATCH",
        least=1,
        most=2**20,
        help="most tokens that llama.cpp computes at once",
    )
    threads: int = option(
        -1,
        "-t",
        "--threads",
        group="Context and threads",
        env="LLAMA_ARG_THREADS",
        least=-1,
        most=512,
        help="CPU threads in decode; -1: one a physical core",
    )
    threads_batch: int = option(
        -1,
        "-tb",
        "--threads-batch",
        group="Context and threads",
        least=-1,
        most=512,
        help="CPU threads in prefill; -1: as in decode",
    )
    flash_attn: str = option(
        "auto",
        "-fa",
        "--flash-attn",
        group="Context and threads",
        env="LLAMA_ARG_FLASH_ATTN",
        choices=("on", "off", "auto"),
        help="flash attention",
    )
    cache_type_k: str = option(
        "f16",
        "-ctk",
        "--cache-type-k",
        group="Context and threads",
        env="LLAMA_ARG_CACHE_TYPE_K",
        choices=_CACHE_TYPES,
        help="type of the keys in the KV cache",
    )
    cache_type_v: str = option(
        "f16",
        "-ctv",
        "--cache-type-v",
        group="Context and threads",
        env="LLAMA_ARG_CACHE_TYPE_V",
        choices=_CACHE_TYPES,
        help="type of the values in the KV cache",
    )
    kv_unified: bool = option(
        True,
        "-kvu",
        "--kv-unified",
        group="Context and threads",
        env="LLAMA_ARG_KV_UNIFIED",
        help="one KV cache that all slots share, not an equal part for each",
    )
    kv_unified_per_slot: int = option(
        0,
        "--kv-unified-per-slot",
        group="Context and threads",
        env="LLAMA_ARG_KV_UNIFIED_PER_SLOT",
        least=0,
        most=2**31 - 1,
        help="most tokens of one slot's sequence; without --ctx-size, the KV cache is as large as "
        "all slots need then; 0: no limit",
    )
    context_shift: bool = option(
        False,
        "--context-shift",
        group="Context and threads",
        env="LLAMA_ARG_CONTEXT_SHIFT",
        help="when a context is full, go on without the older half of it",
    )
    cache_prompt: bool = option(
        True,
        "--cache-prompt",
        group="Context and threads",
        env="LLAMA_ARG_CACHE_PROMPT",
        help="reuse what the KV cache already holds of a prompt",
    )
    strategy: str = option(
        "decode-maximal",
        "--strategy",
        group="Context and threads",
        env="TRIOSERVE_STRATEGY",
        help="how a tick is shared between decode and prefill: decode-maximal, "
        "prefill-priority, balanced, or a class of yours as module:Class",
    )
    max_tick_ms: float = option(
        50.0,
        "--max-tick-ms",
        group="Context and threads",
        env="TRIOSERVE_MAX_TICK_MS",
        least=1,
        help="milliseconds that prompts may stretch a tick to while streams are decoding",
    )
    stream_interval_ms: float = option(
        10.0,
        "--stream-interval-ms",
        group="Context and threads",
        env="TRIOSERVE_STREAM_INTERVAL_MS",
        least=0,
        help="tokens that come within this time leave as one event, the first and the last of a "
        "request at once; 0: each on its own",
    )
    cache_seqs: int = option(
        -1,
        "--cache-seqs",
        group="Context and threads",
        env="TRIOSERVE_CACHE_SEQS",
        least=-1,
        most=255,
        help="KV sequences to keep for later prompts, beside those of the slots; "
        "-1: 32 in a unified KV cache, else 0",
    )
    cache_ram: int = option(
        2048,
        "-cram",
        "--cache-ram",
        group="Context and threads",
        env="LLAMA_ARG_CACHE_RAM",
        least=0,
        help="MiB of RAM for prompts that leave the KV cache; 0: none",
    )
    cache_idle_slots: bool = option(
        True,
        "--cache-idle-slots",
        group="Context and threads",
        env="LLAMA_ARG_CACHE_IDLE_SLOTS",
        help="when a request starts, send prompts that no request uses to RAM, so that a unified "
        "KV cache stays small and quick",
    )
