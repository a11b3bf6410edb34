"""The configuration: one frozen class, from flags, the environment or a program.

Each field of `Config` carries its flags, its environment variable and its help text, so the
command line, the environment and the reference in ``docs/`` are all made from this class.
Flags and variables have the names that llama-server gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs

from trioserve.config.chat_options import ChatOptions
from trioserve.config.context_options import ContextOptions
from trioserve.config.embedding_options import EmbeddingOptions
from trioserve.config.log_options import LogOptions
from trioserve.config.network import Network
from trioserve.config.operation_options import OperationOptions
from trioserve.config.option import option
from trioserve.config.tuning import Tuning
from trioserve.errors import ConfigError
from trioserve.types import SamplingParams

#: The groups of options, in the order in which they are listed.
GROUPS = (
    "Model",
    "Context and threads",
    "Long contexts",
    "Devices",
    "Sampling",
    "Chat",
    "Embeddings",
    "Server",
    "Network",
    "Limits",
    "Logs",
)

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


_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")


@attrs.frozen(kw_only=True)
class Config(
    ContextOptions, Tuning, ChatOptions, Network, LogOptions, EmbeddingOptions, OperationOptions
):
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
        help="names of the model in the API, separated by commas, of which the first is on its "
        "answers; none: the name of its file",
    )
    tags: tuple[str, ...] = option(
        (),
        "--tags",
        group="Model",
        env="LLAMA_ARG_TAGS",
        help="words about the model that GET /v1/models tells, separated by commas",
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
        help="most tokens of output when a request does not say; -1: until the context is full, or "
        "with --context-shift as many tokens as it has",
    )
    n_keep: int = option(
        0,
        "--keep",
        group="Sampling",
        least=-1,
        most=2**31 - 1,
        help="tokens at the beginning that --context-shift keeps; -1: the prompt",
    )
    stop: tuple[str, ...] = option(
        (),
        "-r",
        "--reverse-prompt",
        group="Sampling",
        help="text that ends the output when a request names none; \\n and the like are read as "
        "in C",
    )
    grammar: str | None = option(
        None,
        "--grammar",
        group="Sampling",
        help="grammar in GBNF for requests that have none of their own",
    )
    json_schema: str | None = option(
        None,
        "-j",
        "--json-schema",
        group="Sampling",
        help="JSON Schema for requests that have none of their own",
    )
    spm_infill: bool = option(
        False,
        "--spm-infill",
        group="Sampling",
        help="in /infill, put the text after the gap first: suffix, prefix, middle",
    )
    sampling: SamplingParams = attrs.field(factory=SamplingParams)

    # -- Server
    host: str = option(
        "127.0.0.1",
        "--host",
        group="Server",
        env="LLAMA_ARG_HOST",
        help="address to listen on, or the path of a socket, which ends in .sock; several are "
        "separated by commas",
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
        help="Jinja text of a chat template, or the name of a known one; none: the model's own",
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

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names of the model that were given, in their order."""
        return tuple(name.strip() for name in (self.alias or "").split(",") if name.strip())

    def __attrs_post_init__(self) -> None:
        """Refuse what no single field can see, and what is not there yet."""
        Tuning.__attrs_post_init__(self)
        Network.__attrs_post_init__(self)
        EmbeddingOptions.__attrs_post_init__(self)
        ChatOptions.__attrs_post_init__(self)
        OperationOptions.__attrs_post_init__(self)
        if self.alias is not None and not self.aliases:
            raise ConfigError(f"alias is {self.alias!r}, and must be a name, or several")
        if not all(name.strip() for name in self.host.split(",")):
            raise ConfigError(f"host is {self.host!r}, and must be a name, an IP address or a path "
                              "that ends in .sock, or several, separated by commas")  # fmt: skip
        if self.lora and self.serves_embeddings:
            raise ConfigError("lora has no effect on embeddings and reranking")
        if self.grammar and self.json_schema:
            raise ConfigError("grammar and json_schema exclude each other")
        if self.json_schema:
            _check_json(self.json_schema)
        if not all(isinstance(key, str) and key.strip() for key in self.api_keys):
            raise ConfigError("api_keys holds a key that is empty or not text")


def _check_json(schema: str) -> None:
    try:
        json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema is not JSON: {error}") from None
