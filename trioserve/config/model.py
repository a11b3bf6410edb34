"""`ModelConfig`: what one model needs. A second model of the same server would have its own."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import attrs

from trioserve.config.drafts import CACHE_TYPES, DraftConfig
from trioserve.config.option import option
from trioserve.config.readers import (
    parse_adapter,
    parse_json,
    parse_override,
    parse_placement,
    parse_rpc,
)
from trioserve.errors import ConfigError
from trioserve.types import SamplingParams
from trioserve.types.params import INT32_MAX

_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
_ON_OFF_AUTO = ("on", "off", "auto")

_model = partial(option, group="Model")
_context = partial(option, group="Context and threads")
_position = partial(option, group="Long contexts")
_device = partial(option, group="Devices")
_sampling = partial(option, group="Sampling")
_chat = partial(option, group="Chat")
_embedding = partial(option, group="Embeddings")


# -- checks of several fields, or of what is inside one


def _check_alias(config: ModelConfig) -> None:
    if config.alias is not None and not config.aliases:
        raise ConfigError(f"alias must be a name, or several separated by commas, "
                          f"not {config.alias!r}")  # fmt: skip


def _check_overrides(config: ModelConfig) -> None:
    for text in config.override_kv:
        parse_override(text)
    for text in config.override_tensor:
        parse_placement(text)


def _check_rpc(config: ModelConfig) -> None:
    for text in config.rpc:
        parse_rpc(text)
    if len(set(config.rpc)) < len(config.rpc):
        raise ConfigError("rpc names a machine twice")


def _check_lora(config: ModelConfig) -> None:
    if config.lora_files and config.serves_embeddings:
        raise ConfigError("lora has no effect on embeddings and reranking")
    if config.control_vector_files and config.serves_embeddings:
        raise ConfigError("control_vector has no effect on embeddings and reranking")
    layers = config.control_vector_layer_range
    if layers and not (len(layers) == 2 and 1 <= layers[0] <= layers[1] <= 10_000):
        raise ConfigError("control_vector_layer_range must be the first and the last layer, "
                          "counted from 1")  # fmt: skip


def _check_shape(config: ModelConfig) -> None:
    if config.grammar and config.json_schema:
        raise ConfigError("grammar and json_schema cannot be used together")
    if config.json_schema:
        parse_json(config.json_schema, "json_schema")


def _check_template_variables(config: ModelConfig) -> None:
    if not isinstance(
        parse_json(config.chat_template_kwargs or "{}", "chat_template_kwargs"), dict
    ):
        raise ConfigError("chat_template_kwargs must be a JSON object")


def _check_pooling(config: ModelConfig) -> None:
    if config.reranking and config.pooling not in ("auto", "rank"):
        raise ConfigError(f"reranking needs pooling 'rank', not {config.pooling!r}")
    if config.pooling != "auto" and not config.serves_embeddings:
        raise ConfigError("pooling has no effect without embeddings or reranking")
    if config.has_draft_model and config.serves_embeddings:
        raise ConfigError("spec_draft_model has no effect on embeddings and reranking")
    if config.draft_types and config.serves_embeddings:
        raise ConfigError("spec_type has no effect on embeddings and reranking")
    if (config.mmproj or config.mmproj_url) is not None and config.reranking:
        raise ConfigError("mmproj has no effect on reranking: documents are text")


def _check_backend_sampling(config: ModelConfig) -> None:
    if config.backend_sampling and config.draft_types:
        raise ConfigError("backend_sampling and drafts exclude each other: llama.cpp samples one "
                          "token of a sequence at a time")  # fmt: skip
    if config.backend_sampling and config.serves_embeddings:
        raise ConfigError("backend_sampling has no effect on embeddings and reranking")


# -- the fields; not formatted, because a field reads best as its names above its help
# fmt: off


@attrs.frozen(kw_only=True)
class ModelConfig(DraftConfig):
    """A model and how to run it. Names are llama-server's where it has the same field.

    Raises:
        ConfigError: a value cannot be used; the message names the field.
    """

    CHECKS = (
        _check_alias, _check_overrides, _check_rpc, _check_lora, _check_shape,
        _check_template_variables, _check_pooling, *DraftConfig.CHECKS, _check_backend_sampling,
    )

    # -- Model
    alias: str | None = _model(None, "-a --alias LLAMA_ARG_ALIAS",
        help="names of the model in the API, separated by commas; responses carry the first; "
        "by default the name of the file")
    tags: tuple[str, ...] = _model((), "--tags LLAMA_ARG_TAGS",
        help="tags that GET /v1/models lists for the model, separated by commas")
    n_gpu_layers: int = _model(-1,
        "-ngl --gpu-layers --n-gpu-layers LLAMA_ARG_N_GPU_LAYERS", min=-1,
        help="number of layers to keep on the GPU, if llama.cpp was built for one; -1 = all")
    load_mode: str = _model("auto", "-lm --load-mode LLAMA_ARG_LOAD_MODE", choices=_LOAD_MODES,
        help="how the model file is read into memory; auto = read it into huge pages where Linux "
        "has them and twice its size is free, otherwise map it")
    check_tensors: bool = _model(False, "--check-tensors | --no-check-tensors",
        help="check the weights for invalid values")
    lora: tuple[str, ...] = _model((), "--lora",
        help="LoRA adapters to load, each as PATH or PATH:SCALE, separated by commas; the scale is "
        "1 if not given")
    control_vector: tuple[str, ...] = _model((), "--control-vector",
        help="control vectors to add to the model's layers, each as PATH or PATH:SCALE, separated "
        "by commas; the scale is 1 if not given")
    control_vector_layer_range: tuple[int, ...] = _model((), "--control-vector-layer-range",
        help="first and last layer that control vectors change, as two numbers; by default all")
    lora_init_without_apply: bool = _model(False, "--lora-init-without-apply",
        help="load the adapters but leave them switched off until POST /lora-adapters or a request "
        "gives them a scale")

    # -- Context and threads
    ctx_size: int = _context(0, "-c --ctx-size LLAMA_ARG_CTX_SIZE", min=0, max=INT32_MAX,
        help="size of the KV cache in tokens, for all slots together; 0 = the context length that "
        "the model was trained with")
    parallel: int = _context(4, "-np --parallel LLAMA_ARG_N_PARALLEL", min=1, max=256,
        help="number of slots: requests that run at the same time")
    batch_size: int = _context(2048, "-b --batch-size LLAMA_ARG_BATCH", min=1, max=2**20,
        help="maximum number of tokens in one step: the logical batch")
    ubatch_size: int = _context(512, "-ub --ubatch-size LLAMA_ARG_UBATCH", min=1, max=2**20,
        help="maximum number of tokens that llama.cpp computes at once: the physical batch")
    threads: int = _context(-1, "-t --threads LLAMA_ARG_THREADS", min=-1, max=512,
        help="number of CPU threads for decoding; -1 = one per physical core, and fewer while "
        "other processes use the cores")
    threads_batch: int = _context(-1, "-tb --threads-batch", min=-1, max=512,
        help="number of CPU threads for prompt processing; -1 = the same as --threads")
    flash_attn: str = _context("auto", "-fa --flash-attn LLAMA_ARG_FLASH_ATTN",
        choices=_ON_OFF_AUTO, help="whether to use flash attention")
    cache_type_k: str = _context("f16", "-ctk --cache-type-k LLAMA_ARG_CACHE_TYPE_K",
        choices=CACHE_TYPES, help="data type of the keys in the KV cache")
    cache_type_v: str = _context("f16", "-ctv --cache-type-v LLAMA_ARG_CACHE_TYPE_V",
        choices=CACHE_TYPES, help="data type of the values in the KV cache")
    kv_unified: bool | None = _context(None,
        "-kvu --kv-unified | -no-kvu --no-kv-unified LLAMA_ARG_KV_UNIFIED",
        help="share one KV cache between all slots, or give each an equal part; by default it is "
        "shared, except by more than 4 slots whose parts have 4,096 tokens or more")
    kv_unified_per_slot: int = _context(0,
        "--kv-unified-per-slot LLAMA_ARG_KV_UNIFIED_PER_SLOT", min=0, max=INT32_MAX,
        help="maximum number of tokens in one slot's sequence; without --ctx-size, the KV cache is "
        "made large enough for all slots at that length; 0 = no limit")
    context_shift: bool = _context(False,
        "--context-shift | --no-context-shift LLAMA_ARG_CONTEXT_SHIFT",
        help="when the context is full, drop its older half and go on")
    cache_prompt: bool = _context(True, "--cache-prompt | --no-cache-prompt LLAMA_ARG_CACHE_PROMPT",
        help="reuse the part of a prompt that is already in the KV cache")
    cont_batching: bool = _context(True,
        "-cb --cont-batching | -nocb --no-cont-batching LLAMA_ARG_CONT_BATCHING",
        help="process prompts while other requests generate; without it, they wait until no "
        "request does")
    backend_sampling: bool = _context(False,
        "-bs --backend-sampling LLAMA_ARG_BACKEND_SAMPLING",
        help="sample on the device that computes the logits, where the samplers of a request can; "
        "for many slots on a GPU")
    strategy: str = _context("decode-maximal", "--strategy TRIOSERVE_STRATEGY",
        help="how a step is divided between decoding and prompt processing: decode-maximal, "
        "prefill-priority, balanced, or your own class as module:Class")
    max_tick_ms: float = _context(0.0, "--max-tick-ms TRIOSERVE_MAX_TICK_MS", min=0,
        help="milliseconds that a stream's token takes on average while prompts are processed "
        "beside it; 0 = four times as long as without prompts")
    stream_interval_ms: float = _context(33.0,
        "--stream-interval-ms TRIOSERVE_STREAM_INTERVAL_MS", min=0,
        help="tokens generated within this number of milliseconds are sent as one event, except "
        "the first and the last of a request, which never wait; 0 = send each token on its own")
    cache_seqs: int = _context(-1, "--cache-seqs TRIOSERVE_CACHE_SEQS", min=-1, max=255,
        help="number of KV sequences to keep for later prompts, in addition to those of the slots; "
        "-1 = 32 with a shared KV cache, otherwise none")
    cache_ram: int = _context(2048, "-cram --cache-ram LLAMA_ARG_CACHE_RAM", min=0,
        help="MiB of RAM for prompts that are moved out of the KV cache, and for checkpoints; "
        "0 = none, -1 = no limit")
    ctx_checkpoints: int = _context(32,
        "-ctxcp --ctx-checkpoints --swa-checkpoints LLAMA_ARG_CTX_CHECKPOINTS",
        min=0, max=INT32_MAX,
        help="maximum number of checkpoints for each slot, on average: states that a prompt can "
        "start from where the KV cache cannot be cut (sliding windows, recurrent and hybrid "
        "models); 0 = none")
    checkpoint_min_step: int = _context(8192,
        "-cms --checkpoint-min-step LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", min=0, max=INT32_MAX,
        help="number of tokens after which a long prompt gets another checkpoint, besides those "
        "between its messages; 0 = only those")
    cache_idle_slots: bool = _context(True,
        "--cache-idle-slots | --no-cache-idle-slots LLAMA_ARG_CACHE_IDLE_SLOTS",
        help="when a request starts, move prompts that no request is using to RAM, which keeps a "
        "unified KV cache small and fast")

    # -- Long contexts
    rope_scaling: str = _position("auto", "--rope-scaling LLAMA_ARG_ROPE_SCALING_TYPE",
        choices=("auto", "none", "linear", "yarn"),
        help="how to scale positions beyond the training context; auto = as the model says")
    rope_freq_base: float = _position(0.0, "--rope-freq-base LLAMA_ARG_ROPE_FREQ_BASE", min=0,
        help="base frequency of RoPE; 0 = the model's")
    rope_freq_scale: float = _position(0.0, "--rope-freq-scale LLAMA_ARG_ROPE_FREQ_SCALE", min=0,
        help="factor applied to the RoPE frequencies: 0.5 doubles the context; 0 = the model's")
    yarn_orig_ctx: int = _position(0,
        "--yarn-orig-ctx LLAMA_ARG_YARN_ORIG_CTX", min=0, max=INT32_MAX,
        help="YaRN: context length that the model was trained with; 0 = as the model says")
    yarn_ext_factor: float = _position(-1.0, "--yarn-ext-factor LLAMA_ARG_YARN_EXT_FACTOR",
        help="YaRN: extrapolation mix factor; negative = the model's")
    yarn_attn_factor: float = _position(-1.0, "--yarn-attn-factor LLAMA_ARG_YARN_ATTN_FACTOR",
        help="YaRN: factor applied to the magnitude of the attention; negative = the model's")
    yarn_beta_slow: float = _position(-1.0, "--yarn-beta-slow LLAMA_ARG_YARN_BETA_SLOW",
        help="YaRN: high correction dimension; negative = the model's")
    yarn_beta_fast: float = _position(-1.0, "--yarn-beta-fast LLAMA_ARG_YARN_BETA_FAST",
        help="YaRN: low correction dimension; negative = the model's")
    swa_full: bool = _position(False, "--swa-full LLAMA_ARG_SWA_FULL",
        help="keep the whole sequence in sliding-window layers too, so that a prompt can be reused "
        "from any position")

    # -- Devices
    lazy_mode: str = _device("auto", "-lzm --lazy-mode LLAMA_ARG_LAZY_MODE",
        choices=("auto", "on", "off"),
        help="read rows of large tensors only when they are needed; auto = for tensors above 4 GiB")
    override_kv: tuple[str, ...] = _device((), "--override-kv",
        help="metadata of the model to replace, as KEY=TYPE:VALUE with the type int, float, bool "
        "or str, separated by commas")
    device: tuple[str, ...] = _device((), "-dev --device LLAMA_ARG_DEVICE",
        help="devices to compute on, separated by commas (see --list-devices); none = the CPU only")
    rpc: tuple[str, ...] = _device((), "--rpc LLAMA_ARG_RPC",
        help="other machines that compute a part of the model, as HOST:PORT, separated by commas; "
        "trioserve rpc serve runs there. Nothing between them is encrypted")
    rpc_allow_public: bool = _device(False, "--rpc-allow-public TRIOSERVE_RPC_ALLOW_PUBLIC",
        help="let --rpc connect to addresses of the public internet, where anyone can read along")
    split_mode: str = _device("layer", "-sm --split-mode LLAMA_ARG_SPLIT_MODE",
        choices=("none", "layer", "row", "tensor"), help="how to split the model across GPUs")
    tensor_split: tuple[float, ...] = _device((), "-ts --tensor-split LLAMA_ARG_TENSOR_SPLIT",
        help="how much of the model each GPU gets, as proportions such as 3,1")
    main_gpu: int = _device(0, "-mg --main-gpu LLAMA_ARG_MAIN_GPU", min=0, max=255,
        help="the GPU that holds the whole model when --split-mode is none")
    override_tensor: tuple[str, ...] = _device((),
        "-ot --override-tensor LLAMA_ARG_OVERRIDE_TENSOR",
        help="where to keep the tensors whose names match, as PATTERN=BUFFER, separated by commas")
    cpu_moe: bool = _device(False, "-cmoe --cpu-moe LLAMA_ARG_CPU_MOE",
        help="keep all expert weights of a mixture of experts in CPU memory")
    n_cpu_moe: int = _device(0, "-ncmoe --n-cpu-moe LLAMA_ARG_N_CPU_MOE", min=0, max=1024,
        help="keep the expert weights of the first N layers in CPU memory")
    n_cpu_ffn: int = _device(0, "-ncffn --n-cpu-ffn LLAMA_ARG_N_CPU_FFN", min=0, max=1024,
        help="keep the dense feed-forward weights of the first N layers in CPU memory")
    fit: str = _device("off", "-fit --fit LLAMA_ARG_FIT", choices=("off",),
        help="whether sizes that do not fit are made smaller to fit the memory: only off, for they "
        "are used as given")
    kv_offload: bool = _device(True,
        "-kvo --kv-offload | -nkvo --no-kv-offload LLAMA_ARG_KV_OFFLOAD",
        help="keep the KV cache on the GPU")
    op_offload: bool = _device(True, "--op-offload | --no-op-offload",
        help="let the GPU compute on tensors that are in CPU memory when that is faster")
    repack: bool = _device(True, "--repack | -nr --no-repack LLAMA_ARG_REPACK",
        help="rearrange the weights for the CPU when they are loaded")
    no_host: bool = _device(False, "--no-host LLAMA_ARG_NO_HOST",
        help="do not keep weights in the pinned host memory of a GPU")
    numa: str = _device("none", "--numa LLAMA_ARG_NUMA",
        choices=("none", "distribute", "isolate", "numactl"),
        help="how to place threads on the nodes of a NUMA machine")

    # -- Sampling
    n_predict: int = _sampling(-1,
        "-n --predict --n-predict LLAMA_ARG_N_PREDICT", min=-1, max=INT32_MAX,
        help="maximum number of tokens to generate when a request does not say; -1 = until the "
        "context is full, or with --context-shift as many tokens as the context holds")
    n_keep: int = _sampling(0, "--keep", min=-1, max=INT32_MAX,
        help="number of tokens at the start that --context-shift keeps; -1 = the whole prompt")
    stop: tuple[str, ...] = _sampling((), "-r --reverse-prompt",
        help="stop string for requests that name none; escapes such as \\n are read as in C")
    grammar: str | None = _sampling(None, "--grammar",
        help="GBNF grammar for requests that have none of their own")
    json_schema: str | None = _sampling(None, "-j --json-schema",
        help="JSON Schema for requests that have none of their own")
    spm_infill: bool = _sampling(False, "--spm-infill | --no-spm-infill",
        help="order the parts of an /infill prompt as suffix, prefix, middle")
    sampling: SamplingParams = attrs.field(factory=SamplingParams)

    # -- Chat
    chat_template: str | None = _chat(None, "--chat-template LLAMA_ARG_CHAT_TEMPLATE",
        help="Jinja source of a chat template, or the name of a known one; by default the model's")
    jinja: bool = _chat(True, "--jinja | --no-jinja LLAMA_ARG_JINJA",
        help="run chat templates as Jinja; --no-jinja = use the templates built into llama.cpp, if "
        "it has one like the model's; without tools, reasoning and chat_template_kwargs")
    chat_template_kwargs: str = _chat("",
        "--chat-template-kwargs LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        help='variables for the chat template, as a JSON object such as {"key": "value"}')
    special: bool = _chat(False, "-sp --special",
        help="write the names of control tokens in the output, that of the last one too")
    skip_chat_parsing: bool = _chat(False,
        "--skip-chat-parsing | --no-skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING",
        help="leave reasoning and tool calls in the content, as the model wrote them")
    reasoning: str = _chat("auto", "-rea --reasoning LLAMA_ARG_REASONING", choices=_ON_OFF_AUTO,
        help="whether the chat template asks the model to think; auto = if it can")
    reasoning_format: str = _chat("auto", "--reasoning-format LLAMA_ARG_THINK",
        choices=("none", "auto", "deepseek", "deepseek-legacy"),
        help="where reasoning goes; none = it stays in the content, auto and deepseek = into "
        "reasoning_content, deepseek-legacy = into both")
    reasoning_effort: str = _chat("default", "--reasoning-effort LLAMA_ARG_REASONING_EFFORT",
        help="effort that is passed to the chat template, such as low or high; default = pass none")
    reasoning_budget: int = _chat(-1,
        "--reasoning-budget LLAMA_ARG_THINK_BUDGET", min=-1, max=INT32_MAX,
        help="maximum number of tokens of reasoning; 0 = end it at once, -1 = no limit")
    reasoning_budget_message: str = _chat("",
        "--reasoning-budget-message LLAMA_ARG_THINK_BUDGET_MESSAGE",
        help="text that is added to the reasoning when its budget is used up")
    reasoning_preserve: bool = _chat(True,
        "--reasoning-preserve | --no-reasoning-preserve LLAMA_ARG_REASONING_PRESERVE",
        help="keep the reasoning of earlier messages in the prompt, if the chat template can")
    prefill_assistant: bool = _chat(True,
        "--prefill-assistant | --no-prefill-assistant LLAMA_ARG_PREFILL_ASSISTANT",
        help="continue the last message if it is the assistant's, instead of answering it")

    # -- Embeddings
    embeddings: bool = _embedding(False, "--embedding --embeddings LLAMA_ARG_EMBEDDINGS",
        help="serve embeddings only, and generate no text")
    reranking: bool = _embedding(False, "--rerank --reranking LLAMA_ARG_RERANKING",
        help="serve reranking only, with a model that is made for it, and generate no text")
    pooling: str = _embedding("auto", "--pooling LLAMA_ARG_POOLING",
        choices=("auto", "none", "mean", "cls", "last", "rank"),
        help="how the embeddings of tokens become that of a text; auto = as the model says")
    embd_normalize: int = _embedding(2, "--embd-normalize", min=-1, max=INT32_MAX,
        help="how embeddings are normalized when a request does not say; -1 = not at all, 0 = to a "
        "maximum of 32760, 1 = taxicab norm, 2 = Euclidean norm, P = p-norm")
    # fmt: on

    def __attrs_post_init__(self) -> None:
        for check in self.CHECKS:
            check(self)

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names of the model that were given, in their order."""
        return tuple(name.strip() for name in (self.alias or "").split(",") if name.strip())

    @property
    def control_vector_files(self) -> tuple[tuple[str, float], ...]:
        """The files of control vectors, each with its scale."""
        return tuple(parse_adapter(text, "control_vector") for text in self.control_vector)

    @property
    def lora_files(self) -> tuple[tuple[str, float], ...]:
        """The adapters: path and scale of each."""
        applied = 0.0 if self.lora_init_without_apply else 1.0
        return tuple((path, scale * applied) for path, scale in map(parse_adapter, self.lora))

    @property
    def serves_embeddings(self) -> bool:
        """Whether the server makes embeddings or ranks, rather than text."""
        return self.embeddings or self.reranking

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the fields give the chat template; a request may set others."""
        variables: dict[str, Any] = {"preserve_reasoning": self.reasoning_preserve}
        if self.reasoning != "auto":
            variables["enable_thinking"] = self.reasoning == "on"
        if self.reasoning_effort != "default":
            variables["reasoning_effort"] = self.reasoning_effort
        variables.update(json.loads(self.chat_template_kwargs or "{}"))
        return variables
