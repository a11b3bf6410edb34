"""The configuration: one frozen class, from flags, the environment or a program.

Each field of `Config` carries its flags, its environment variable and its help text, so the
command line, the environment and the reference in ``docs/`` are all made from this class.
Flags and variables have the names that llama-server gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from trioserve.errors import ConfigError
from trioserve.types import SamplingParams

#: The groups of options, in the order in which they are listed.
GROUPS = ("Model", "Context and threads", "Sampling", "Server", "Limits", "Logs")

#: Sampling defaults that can be set for the whole server: field, flags, help.
SAMPLING_OPTIONS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "seed": (("-s", "--seed"), "seed of the random numbers; -1: a new one each request"),
    "temperature": (("--temp", "--temperature"), "temperature; 0 or less: greedy"),
    "top_k": (("--top-k",), "keep the K most probable tokens; 0: off"),
    "top_p": (("--top-p",), "keep the smallest set with this probability; 1.0: off"),
    "min_p": (("--min-p",), "drop tokens below this share of the best one; 0.0: off"),
    "top_n_sigma": (("--top-nsigma", "--top-n-sigma"), "keep logits within N sigma; -1.0: off"),
    "xtc_probability": (("--xtc-probability",), "chance of removing top tokens; 0.0: off"),
    "xtc_threshold": (("--xtc-threshold",), "what XTC removes is above this; 1.0: off"),
    "typical_p": (("--typical", "--typical-p"), "locally typical sampling; 1.0: off"),
    "repeat_last_n": (("--repeat-last-n",), "tokens the penalties look back; 0: off, -1: all"),
    "repeat_penalty": (("--repeat-penalty",), "penalty for repeated tokens; 1.0: off"),
    "presence_penalty": (("--presence-penalty",), "penalty for tokens seen; 0.0: off"),
    "frequency_penalty": (("--frequency-penalty",), "penalty for each sighting; 0.0: off"),
    "dry_multiplier": (("--dry-multiplier",), "strength of the DRY penalty; 0.0: off"),
    "dry_base": (("--dry-base",), "base of the DRY penalty"),
    "dry_allowed_length": (("--dry-allowed-length",), "length that DRY lets repeat"),
    "dry_penalty_last_n": (("--dry-penalty-last-n",), "tokens DRY looks back; 0: off, -1: all"),
    "adaptive_target": (("--adaptive-target",), "probability to aim at; negative: off"),
    "adaptive_decay": (("--adaptive-decay",), "how slowly adaptive sampling adapts"),
    "dynatemp_range": (("--dynatemp-range",), "range of the dynamic temperature; 0.0: off"),
    "dynatemp_exponent": (("--dynatemp-exp",), "exponent of the dynamic temperature"),
    "mirostat": (("--mirostat",), "Mirostat: 0 off, 1 version 1, 2 version 2"),
    "mirostat_tau": (("--mirostat-ent",), "Mirostat's target entropy"),
    "mirostat_eta": (("--mirostat-lr",), "Mirostat's learning rate"),
    "ignore_eos": (("--ignore-eos",), "go on past the end-of-generation tokens"),
}

#: The variables of those that have one.
SAMPLING_VARIABLES: Mapping[str, str] = {
    "temperature": "LLAMA_ARG_TEMPERATURE",
    "top_k": "LLAMA_ARG_TOP_K",
    "top_p": "LLAMA_ARG_TOP_P",
    "min_p": "LLAMA_ARG_MIN_P",
    "repeat_penalty": "LLAMA_ARG_REPEAT_PENALTY",
    "presence_penalty": "LLAMA_ARG_PRESENCE_PENALTY",
    "frequency_penalty": "LLAMA_ARG_FREQUENCY_PENALTY",
}


def option(
    default: Any,
    *flags: str,
    group: str,
    help: str,
    env: str | None = None,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Make an attrs field that knows its flags, variable, choices and bounds."""
    metadata = {"flags": flags, "env": env, "group": group, "help": help, "choices": choices}
    return attrs.field(default=default, metadata=metadata, validator=_check(choices, least, most))


_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text"),
    "tuple[str, ...]": ((tuple,), "a tuple of text"),
    "tuple[float, ...]": ((tuple,), "a tuple of numbers"),
}


def _check(
    choices: tuple[str, ...] | None, least: float | None, most: float | None
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        name = attribute.name
        types, kind = _TYPES[str(attribute.type)]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError(f"{name} is {value!r}, and must be {kind}")
        if choices is not None and value not in choices:
            raise ConfigError(f"{name} is {value!r}, and must be one of {', '.join(choices)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if not math.isfinite(value):
            raise ConfigError(f"{name} is {value}, and must be finite")
        if least is not None and value < least:
            raise ConfigError(f"{name} is {value}, and must be at least {least}")
        if most is not None and value > most:
            raise ConfigError(f"{name} is {value}, and must be at most {most}")

    return check


_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")


@attrs.frozen(kw_only=True)
class Config:
    """Everything that can be set. The defaults serve the bundled model on this machine.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    # -- Model
    model: str | None = option(
        None,
        "-m",
        "--model",
        group="Model",
        env="LLAMA_ARG_MODEL",
        help="path of a GGUF file; none: the bundled model",
    )
    alias: str | None = option(
        None,
        "-a",
        "--alias",
        group="Model",
        env="LLAMA_ARG_ALIAS",
        help="name of the model in the API; none: the name of its file",
    )
    n_gpu_layers: int = option(
        -1,
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        group="Model",
        env="LLAMA_ARG_N_GPU_LAYERS",
        least=-1,
        help="layers to keep on the GPU, if llama.cpp was built for one; -1: all",
    )
    load_mode: str = option(
        "auto",
        "-lm",
        "--load-mode",
        group="Model",
        env="LLAMA_ARG_LOAD_MODE",
        choices=_LOAD_MODES,
        help="how the file is read",
    )
    check_tensors: bool = option(
        False, "--check-tensors", group="Model", help="look for invalid values in the weights"
    )

    # -- Context and threads
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

    # -- Sampling
    n_predict: int = option(
        -1,
        "-n",
        "--predict",
        "--n-predict",
        group="Sampling",
        env="LLAMA_ARG_N_PREDICT",
        least=-1,
        most=2**31 - 1,
        help="most tokens of output when a request does not say; -1: until the context is full",
    )
    sampling: SamplingParams = attrs.field(factory=SamplingParams)

    # -- Server
    host: str = option(
        "127.0.0.1",
        "--host",
        group="Server",
        env="LLAMA_ARG_HOST",
        help="address to listen on",
    )
    port: int = option(
        8080,
        "--port",
        group="Server",
        env="LLAMA_ARG_PORT",
        least=0,
        most=65535,
        help="port to listen on; 0: any free one",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "--api-key",
        group="Server",
        env="LLAMA_API_KEY",
        help="keys that clients must show one of, separated by commas; none: no check",
    )
    slots_endpoint: bool = option(
        True, "--slots", group="Server", env="LLAMA_ARG_ENDPOINT_SLOTS", help="serve GET /slots"
    )
    chat_template: str | None = option(
        None,
        "--chat-template",
        group="Server",
        env="LLAMA_ARG_CHAT_TEMPLATE",
        help="Jinja text of a chat template; none: the model's own",
    )
    sse_ping_interval: float = option(
        30.0,
        "--sse-ping-interval",
        group="Server",
        env="LLAMA_ARG_SSE_PING_INTERVAL",
        least=-1,
        help="seconds of silence after which a stream sends a comment; -1: never",
    )

    # -- Limits
    max_queue: int = option(
        1024,
        "--max-queue",
        group="Limits",
        env="TRIOSERVE_MAX_QUEUE",
        least=0,
        help="requests that may wait for a slot; further ones get status 429",
    )
    max_queue_tokens: int = option(
        0,
        "--max-queue-tokens",
        group="Limits",
        env="TRIOSERVE_MAX_QUEUE_TOKENS",
        least=0,
        help="prompt tokens that may wait, all requests together; 0: no limit",
    )
    api_key_weights: tuple[float, ...] = option(
        (),
        "--api-key-weights",
        group="Server",
        env="TRIOSERVE_API_KEY_WEIGHTS",
        help="turns in the queue for each of the API keys, in their order; none: equal ones",
    )
    drain_timeout: float = option(
        30.0,
        "--drain-timeout",
        group="Limits",
        env="TRIOSERVE_DRAIN_TIMEOUT",
        least=0,
        help="seconds that running requests get to finish after SIGTERM",
    )
    unread_tokens: int = option(
        256,
        "--unread-tokens",
        group="Limits",
        env="TRIOSERVE_UNREAD_TOKENS",
        least=1,
        most=2**20,
        help="tokens a client may leave unread before its slot is paused",
    )
    stall_timeout: float = option(
        30.0,
        "--stall-timeout",
        group="Limits",
        env="TRIOSERVE_STALL_TIMEOUT",
        least=0.001,
        help="seconds a slot may stay paused before its request is cancelled",
    )
    keep_alive_timeout: float = option(
        5.0,
        "--keep-alive-timeout",
        group="Limits",
        env="TRIOSERVE_KEEP_ALIVE_TIMEOUT",
        least=0.001,
        help="seconds that an idle connection stays open",
    )
    max_body_size: int = option(
        32 * 2**20,
        "--max-body-size",
        group="Limits",
        env="TRIOSERVE_MAX_BODY_SIZE",
        least=1,
        help="bytes in the body of a request",
    )

    # -- Logs
    log_format: str = option(
        "auto",
        "--log-format",
        group="Logs",
        env="TRIOSERVE_LOG_FORMAT",
        choices=("auto", "pretty", "json"),
        help="auto: pretty on a terminal, JSON otherwise",
    )
    log_level: str = option(
        "info",
        "--log-level",
        group="Logs",
        env="TRIOSERVE_LOG_LEVEL",
        choices=("debug", "info", "warning", "error"),
        help="least level that is written",
    )

    def __attrs_post_init__(self) -> None:
        """Refuse what no single field can see, and what is not there yet."""
        if self.alias is not None and ("," in self.alias or not self.alias.strip()):
            raise ConfigError(f"alias is {self.alias!r}, and must be one name, without a comma")
        if not self.host or self.host.endswith(".sock"):
            raise ConfigError(f"host is {self.host!r}, and must be a name or an IP address")
        if not all(isinstance(key, str) and key.strip() for key in self.api_keys):
            raise ConfigError("api_keys holds a key that is empty or not text")
        if self.chat_template is not None and "{" not in self.chat_template:
            start = repr(self.chat_template[:40])
            raise ConfigError(f"chat_template is {start}, and must be the text of a Jinja template")
