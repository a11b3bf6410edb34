"""`Config`: the whole configuration, frozen, from flags, the environment, a file or a program.

Each field carries its flags, its environment variable and its help text, so the command line,
``--help`` and the reference in ``docs/`` are all made from this class.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import attrs

from trioserve.config import checks
from trioserve.config.checks import ALL_TOOLS, BUILTIN_TOOLS
from trioserve.config.option import option
from trioserve.config.readers import (
    SWITCH_SYNONYMS,
    csv_row,
    names,
    parse_adapter,
    parse_host,
    parse_override,
    parse_placement,
    parse_rpc,
    path_prefix,
    read_mcp_servers,
    size,
    stop_string,
)
from trioserve.types import SamplingParams
from trioserve.types.params import INT32_MAX

_model = partial(option, group="Model")
_context = partial(option, group="Context and threads")
_draft = partial(option, group="Drafts")
_position = partial(option, group="Long contexts")
_device = partial(option, group="Devices")
_sampling = partial(option, group="Sampling")
_chat = partial(option, group="Chat")
_media = partial(option, group="Media")
_speech = partial(option, group="Speech")
_embedding = partial(option, group="Embeddings")
_tool = partial(option, group="Tools")
_models = partial(option, group="Models")
_server = partial(option, group="Server")
_network = partial(option, group="Network")
_limit = partial(option, group="Limits")
_log = partial(option, group="Logs")

_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
_ON_OFF_AUTO = ("on", "off", "auto")
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


# Not formatted, because a field reads best as its names above its help.
# fmt: off
@attrs.frozen(kw_only=True)
class Config:
    """A server and its model. The defaults serve the bundled model on this machine.

    Fields have llama-server's names where it has the same field. A field without names here does
    not exist in llama-server: its flag and its variable follow from its name, such as
    ``--max-queue`` and ``TRIOSERVE_MAX_QUEUE`` for `max_queue`.

    Raises:
        ConfigError: a value is invalid; the message names the field.
    """

    # -- Model
    model: str | None = _model(None, "-m --model LLAMA_ARG_MODEL",
        help="path of a GGUF file, or a model on the hub, as for --hf-repo; without it, the "
        "bundled model is served")
    hf_repo: str | None = _model(None, "-hf -hfr --hf-repo LLAMA_ARG_HF_REPO",
        help="model on the hub (Hugging Face), as USER/REPO or USER/REPO:QUANT; it is downloaded "
        "unless the cache has it; without QUANT it is Q4_K_M, else Q8_0, else the first")
    hf_file: str | None = _model(None, "-hff --hf-file LLAMA_ARG_HF_FILE",
        help="file of that repository to take, whatever QUANT is")
    hf_token: str | None = _model(None, "-hft --hf-token HF_TOKEN",
        help="token that shows the hub who asks; by default the one of hf auth login")
    model_url: str | None = _model(None, "-mu --model-url LLAMA_ARG_MODEL_URL",
        help="address of a GGUF file to download, unless it is in the cache and has not changed; "
        "with --model, to that path")
    offline: bool = _model(False, "--offline LLAMA_ARG_OFFLINE",
        help="download nothing, and take only what is in the cache")
    alias: str | None = _model(None, "-a --alias LLAMA_ARG_ALIAS", check=checks.alias,
        help="names of the model in the API, separated by commas; responses carry the first; by "
        "default the name of the file")
    tags: tuple[str, ...] = _model((), "--tags LLAMA_ARG_TAGS",
        help="tags that GET /v1/models lists for the model, separated by commas")
    n_gpu_layers: int = _model(-1, "-ngl --gpu-layers --n-gpu-layers LLAMA_ARG_N_GPU_LAYERS",
        min=-2, synonyms={"auto": "-1", "all": "-2"},
        help="number of layers to keep on the GPU, if llama.cpp was built for one; -1 = as many as "
        "fit, or with --fit off all; -2 = all")
    load_mode: str = _model("auto", "-lm --load-mode LLAMA_ARG_LOAD_MODE", choices=_LOAD_MODES,
        help="how the model file is read into memory; auto = read it into huge pages where Linux "
        "has them and twice its size is free, otherwise map it")
    check_tensors: bool = _model(False, "--check-tensors | --no-check-tensors",
        help="check the weights for invalid values")
    trial_load: bool = _model(True, "--trial-load | --no-trial-load",
        help="load files that are new to this machine, or have changed, in another process first, "
        "so that a damaged one cannot end this process")
    lora: tuple[str, ...] = _model((), "--lora", read=csv_row, check=parse_adapter,
        help="LoRA adapters to load, each as PATH or PATH:SCALE, separated by commas; the scale is "
        "1 if not given")
    lora_dir: str | None = _model(None, "--lora-dir", check=checks.directory,
        help="folder from which POST /v1/load_lora_adapter loads adapters while the server runs; "
        "without it, the route is refused")
    control_vector: tuple[str, ...] = _model((), "--control-vector", read=csv_row,
        check=parse_adapter,
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
        synonyms={"-1": "4"}, help="number of slots: requests that run at the same time")
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
        choices=_ON_OFF_AUTO, synonyms=SWITCH_SYNONYMS, help="whether to use flash attention")
    cache_type_k: str = _context("f16", "-ctk --cache-type-k LLAMA_ARG_CACHE_TYPE_K",
        choices=_CACHE_TYPES, help="data type of the keys in the KV cache")
    cache_type_v: str = _context("f16", "-ctv --cache-type-v LLAMA_ARG_CACHE_TYPE_V",
        choices=_CACHE_TYPES, help="data type of the values in the KV cache")
    kv_unified: bool | None = _context(None,
        "-kvu --kv-unified | -no-kvu --no-kv-unified LLAMA_ARG_KV_UNIFIED",
        help="share one KV cache between all slots, or give each an equal part; by default, each "
        "has a part as long as the context, with memory for what is used of it, where the system "
        "can do that; otherwise an equal part, if that has 4,096 tokens or more")
    kv_unified_per_slot: int = _context(0, "--kv-unified-per-slot LLAMA_ARG_KV_UNIFIED_PER_SLOT",
        min=0, max=INT32_MAX,
        help="maximum number of tokens in one slot's sequence; without --ctx-size, the KV cache is "
        "made large enough for all slots at that length; 0 = no limit")
    context_shift: bool = _context(False,
        "--context-shift | --no-context-shift LLAMA_ARG_CONTEXT_SHIFT",
        help="when the context is full, drop its older half and continue")
    cache_prompt: bool = _context(True, "--cache-prompt | --no-cache-prompt LLAMA_ARG_CACHE_PROMPT",
        help="reuse the part of a prompt that is already in the KV cache")
    cont_batching: bool = _context(True,
        "-cb --cont-batching | -nocb --no-cont-batching LLAMA_ARG_CONT_BATCHING",
        help="process prompts while other requests generate; without it, they wait until no "
        "request does")
    backend_sampling: bool = _context(False, "-bs --backend-sampling LLAMA_ARG_BACKEND_SAMPLING",
        help="sample on the device that computes the logits, where the samplers of a request can; "
        "for many slots on a GPU")
    strategy: str = _context("decode-maximal",
        help="how a step is divided between decoding and prompt processing: decode-maximal, "
        "prefill-priority, balanced, or your own class as module:Class")
    max_tick_ms: float = _context(0.0, min=0,
        help="milliseconds that a stream's token takes on average while prompts are processed "
        "beside it; 0 = four times as long as without prompts")
    stream_interval_ms: float = _context(33.0, min=0,
        help="the most milliseconds that tokens wait to be sent as one event, with many streams; "
        "few streams wait for less, and the first and the last token of a request never wait; "
        "0 = send each token on its own")
    cache_seqs: int = _context(-1, min=-1, max=255,
        help="number of KV sequences to keep for later prompts, in addition to those of the slots; "
        "-1 = 32 with a shared KV cache, otherwise none")
    cache_ram: int = _context(2048, "-cram --cache-ram LLAMA_ARG_CACHE_RAM", min=0,
        synonyms={"-1": str(2**40)},
        help="MiB of RAM for prompts that are moved out of the KV cache, and for checkpoints; 0 = "
        "none, -1 = no limit")
    cache_disk: str | None = _context(None, "--cache-disk",
        check=checks.new_directory,
        help="folder for prompts that leave the RAM of --cache-ram, where they are found again "
        "after a restart; other servers may use the same one")
    cache_disk_size: int = _context(20 * 2**30, "--cache-disk-size", read=size, min=2**20,
        help="the most that all files in that folder may take, such as 500MiB or 20GiB; the "
        "least recently used ones go first")
    ctx_checkpoints: int = _context(32,
        "-ctxcp --ctx-checkpoints --swa-checkpoints LLAMA_ARG_CTX_CHECKPOINTS", min=0,
        max=INT32_MAX,
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

    # -- Drafts
    spec_type: tuple[str, ...] = _draft(("none",), "--spec-type LLAMA_ARG_SPEC_TYPE",
        check=checks.draft_type,
        help="what to guess the next tokens from, so that one step can check several: ngram-simple "
        "= the request's own text, ngram-mod = those of earlier requests too, draft-mtp = the MTP "
        "heads in the model's file or in the one that spec_draft_model names, draft-eagle3, "
        "draft-dflash and draft-dspark = the head that it names, auto = ngram-simple and the "
        "model's head, none = do not; several, with commas: those of n-grams are asked first")
    spec_ngram_simple_size_n: int = _draft(6, "--spec-ngram-simple-size-n", min=1, max=1024,
        help="ngram-simple: number of last tokens that must have come before in the same order")
    spec_ngram_simple_size_m: int = _draft(64, "--spec-ngram-simple-size-m", min=1, max=1024,
        help="ngram-simple: maximum number of tokens to guess")
    spec_ngram_mod_n_match: int = _draft(8, "--spec-ngram-mod-n-match", min=1, max=1024,
        help="ngram-mod: number of last tokens that must have come before in the same order")
    spec_ngram_mod_n_min: int = _draft(1, "--spec-ngram-mod-n-min", min=0, max=1024,
        help="ngram-mod: minimum number of tokens to guess")
    spec_ngram_mod_n_max: int = _draft(64, "--spec-ngram-mod-n-max", min=1, max=1024,
        help="ngram-mod: maximum number of tokens to guess")
    spec_draft_model: str | None = _draft(None,
        "-md --model-draft --spec-draft-model LLAMA_ARG_SPEC_DRAFT_MODEL",
        help="path of a GGUF file with a small model of the same vocabulary, which guesses what "
        "the model says next; or a model on the hub, as for --hf-repo")
    spec_draft_hf: str | None = _draft(None,
        "--spec-draft-hf -hfd -hfrd --hf-repo-draft LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        help="such a model on the hub, as for --hf-repo")
    spec_draft_n_max: int = _draft(16, "--spec-draft-n-max LLAMA_ARG_SPEC_DRAFT_N_MAX", min=1,
        max=1024, help="maximum number of tokens in a draft of the draft model; most drafts are "
        "shorter, for they are as long as it pays")
    spec_draft_n_min: int = _draft(0, "--spec-draft-n-min LLAMA_ARG_SPEC_DRAFT_N_MIN", min=0,
        max=1024, help="minimum number of tokens in a draft of the draft model; no less are used")
    spec_draft_p_min: float = _draft(0.0,
        "--draft-p-min --spec-draft-p-min LLAMA_ARG_SPEC_DRAFT_P_MIN", min=0, max=1,
        help="a draft ends before a token that the draft model finds less probable than this")
    spec_draft_threads: int = _draft(-1, "-td --threads-draft --spec-draft-threads", min=-1,
        max=512,
        help="number of CPU threads for the draft model; -1 = the same as --threads, 0 = one for "
        "each logical CPU")
    spec_draft_threads_batch: int = _draft(-1,
        "-tbd --threads-batch-draft --spec-draft-threads-batch", min=-1, max=512,
        help="number of CPU threads for prompts in the draft model; -1 = the same as "
        "--threads-draft, or without it as --threads-batch")
    spec_draft_type_k: str = _draft("f16",
        "-ctkd --cache-type-k-draft --spec-draft-type-k LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        choices=_CACHE_TYPES, help="data type of the keys in the draft model's KV cache")
    spec_draft_type_v: str = _draft("f16",
        "-ctvd --cache-type-v-draft --spec-draft-type-v LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        choices=_CACHE_TYPES, help="data type of the values in the draft model's KV cache")
    spec_draft_ngl: int = _draft(-1,
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl "
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT", min=-1, synonyms={"auto": "-1", "all": "-1"},
        help="number of the draft model's layers to keep on the GPU; -1 = all")
    spec_draft_device: tuple[str, ...] = _draft((), "-devd --device-draft --spec-draft-device",
        help="devices to compute the draft model on, separated by commas; none = the CPU only; by "
        "default those of --device")
    spec_draft_override_tensor: tuple[str, ...] = _draft((),
        "-otd --override-tensor-draft --spec-draft-override-tensor", read=csv_row,
        check=parse_placement,
        help="where to keep tensors of the draft model whose names match, as PATTERN=BUFFER, "
        "separated by commas")
    spec_draft_cpu_moe: bool = _draft(False,
        "-cmoed --cpu-moe-draft --spec-draft-cpu-moe LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
        help="keep all expert weights of the draft model in CPU memory")
    spec_draft_n_cpu_moe: int = _draft(0,
        "-ncmoed --n-cpu-moe-draft --spec-draft-ncmoe --spec-draft-n-cpu-moe "
        "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", min=0, max=1024,
        help="keep the expert weights of the draft model's first N layers in CPU memory")

    # -- Long contexts
    rope_scaling: str = _position("auto", "--rope-scaling LLAMA_ARG_ROPE_SCALING_TYPE",
        choices=("auto", "none", "linear", "yarn"),
        help="how to scale positions beyond the training context; auto = as the model says")
    rope_freq_base: float = _position(0.0, "--rope-freq-base LLAMA_ARG_ROPE_FREQ_BASE", min=0,
        help="base frequency of RoPE; 0 = the model's")
    rope_freq_scale: float = _position(0.0, "--rope-freq-scale LLAMA_ARG_ROPE_FREQ_SCALE", min=0,
        help="factor applied to the RoPE frequencies: 0.5 doubles the context; 0 = the model's")
    yarn_orig_ctx: int = _position(0, "--yarn-orig-ctx LLAMA_ARG_YARN_ORIG_CTX", min=0,
        max=INT32_MAX,
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
        help="keep whole prompts in sliding-window layers too, so that any part can be reused")

    # -- Devices
    lazy_mode: str = _device("auto", "-lzm --lazy-mode LLAMA_ARG_LAZY_MODE",
        choices=("auto", "on", "off"),
        help="read rows of large tensors only when they are needed; auto = for tensors above 4 GiB")
    override_kv: tuple[str, ...] = _device((), "--override-kv", read=csv_row, check=parse_override,
        help="metadata of the model to replace, as KEY=TYPE:VALUE with the type int, float, bool "
        "or str, separated by commas")
    device: tuple[str, ...] = _device((), "-dev --device LLAMA_ARG_DEVICE",
        help="devices to compute on, separated by commas (see --list-devices); none = the CPU only")
    rpc: tuple[str, ...] = _device((), "--rpc LLAMA_ARG_RPC", check=parse_rpc,
        help="other machines that compute a part of the model, as HOST:PORT, separated by commas; "
        "trioserve rpc serve runs there. Nothing between them is encrypted")
    rpc_allow_public: bool = _device(False,
        help="let --rpc connect to addresses of the public internet, where anyone can read along")
    split_mode: str = _device("layer", "-sm --split-mode LLAMA_ARG_SPLIT_MODE",
        choices=("none", "layer", "row", "tensor"), help="how to split the model across GPUs")
    tensor_split: tuple[float, ...] = _device((), "-ts --tensor-split LLAMA_ARG_TENSOR_SPLIT",
        help="how much of the model each GPU gets, as proportions such as 3,1")
    main_gpu: int = _device(0, "-mg --main-gpu LLAMA_ARG_MAIN_GPU", min=0, max=255,
        help="the GPU that holds the whole model when --split-mode is none")
    override_tensor: tuple[str, ...] = _device((),
        "-ot --override-tensor LLAMA_ARG_OVERRIDE_TENSOR", read=csv_row, check=parse_placement,
        help="where to keep the tensors whose names match, as PATTERN=BUFFER, separated by commas")
    cpu_moe: bool = _device(False, "-cmoe --cpu-moe LLAMA_ARG_CPU_MOE",
        help="keep all expert weights of a mixture of experts in CPU memory")
    n_cpu_moe: int = _device(0, "-ncmoe --n-cpu-moe LLAMA_ARG_N_CPU_MOE", min=0, max=1024,
        help="keep the expert weights of the first N layers in CPU memory")
    n_cpu_ffn: int = _device(0, "-ncffn --n-cpu-ffn LLAMA_ARG_N_CPU_FFN", min=0, max=1024,
        help="keep the dense feed-forward weights of the first N layers in CPU memory")
    fit: str = _device("on", "-fit --fit LLAMA_ARG_FIT", choices=("on", "off"),
        synonyms=SWITCH_SYNONYMS,
        help="whether sizes that are not set are made smaller where the model does not fit into "
        "the free memory: the context, layers on the GPU, the physical batch, and the precision of "
        "the KV cache last")
    fit_target: tuple[int, ...] = _device((1024,), "-fitt --fit-target LLAMA_ARG_FIT_TARGET",
        help="MiB that --fit leaves free on each GPU, separated by commas; the last number is that "
        "of all further GPUs")
    fit_ctx: int = _device(4096, "-fitc --fit-ctx LLAMA_ARG_FIT_CTX", min=256, max=INT32_MAX,
        help="the smallest context, in tokens, that --fit may choose")
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
    n_predict: int = _sampling(-1, "-n --predict --n-predict LLAMA_ARG_N_PREDICT", min=-1,
        max=INT32_MAX,
        help="maximum number of tokens to generate when a request does not say; -1 = until the "
        "context is full, or with --context-shift as many tokens as the context holds")
    n_keep: int = _sampling(0, "--keep", min=-1, max=INT32_MAX,
        help="number of tokens at the start that --context-shift keeps; -1 = the whole prompt")
    stop: tuple[str, ...] = _sampling((), "-r --reverse-prompt", read=stop_string,
        help="stop string for requests that name none; escapes such as \\n are read as in C")
    grammar: str | None = _sampling(None, "--grammar",
        help="GBNF grammar for requests without a grammar")
    json_schema: str | None = _sampling(None, "-j --json-schema", check=checks.json_schema,
        help="JSON Schema for requests without a schema")
    spm_infill: bool = _sampling(False, "--spm-infill | --no-spm-infill",
        help="order the parts of an /infill prompt as suffix, prefix, middle")
    sampling: SamplingParams = attrs.field(factory=SamplingParams)

    # -- Chat
    chat_template: str | None = _chat(None, "--chat-template LLAMA_ARG_CHAT_TEMPLATE",
        help="Jinja source of a chat template, or the name of a known one; by default the model's")
    jinja: bool = _chat(True, "--jinja | --no-jinja LLAMA_ARG_JINJA",
        help="run chat templates as Jinja; --no-jinja = use the templates built into llama.cpp, if "
        "it has one like the model's; without tools, reasoning and chat_template_kwargs")
    chat_template_kwargs: str = _chat("", "--chat-template-kwargs LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        check=checks.json_object,
        help='variables for the chat template, as a JSON object such as {"key": "value"}')
    special: bool = _chat(False, "-sp --special",
        help="write the names of control tokens in the output, that of the last one too")
    skip_chat_parsing: bool = _chat(False,
        "--skip-chat-parsing | --no-skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING",
        help="leave reasoning and tool calls in the content, as the model wrote them")
    reasoning: str = _chat("auto", "-rea --reasoning LLAMA_ARG_REASONING", choices=_ON_OFF_AUTO,
        synonyms=SWITCH_SYNONYMS,
        help="whether the chat template asks the model to think; auto = if it can")
    reasoning_format: str = _chat("auto", "--reasoning-format LLAMA_ARG_THINK",
        choices=("none", "auto", "deepseek", "deepseek-legacy"),
        help="where reasoning goes; none = it stays in the content, auto and deepseek = into "
        "reasoning_content, deepseek-legacy = into both")
    reasoning_effort: str = _chat("default", "--reasoning-effort LLAMA_ARG_REASONING_EFFORT",
        help="effort that is passed to the chat template, such as low or high; default = pass none")
    reasoning_budget: int = _chat(-1, "--reasoning-budget LLAMA_ARG_THINK_BUDGET", min=-1,
        max=INT32_MAX,
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

    # -- Media
    mmproj: str | None = _media(None, "-mm --mmproj LLAMA_ARG_MMPROJ",
        help="path of a GGUF file with the model's projector, which takes images or sound; by "
        "default the one that comes with a model from the hub")
    mmproj_url: str | None = _media(None, "-mmu --mmproj-url LLAMA_ARG_MMPROJ_URL",
        help="address of such a file to download, unless it is in the cache and has not changed; "
        "with --mmproj, to that path")
    mmproj_auto: bool = _media(True,
        "--mmproj-auto | --no-mmproj --no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO",
        help="use the projector that comes with a model")
    mmproj_offload: bool = _media(True,
        "--mmproj-offload | --no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD",
        help="run the projector on the GPU")
    mmproj_device: str | None = _media(None, "-mmdev --mmproj-device MTMD_BACKEND_DEVICE",
        help="device to run the projector on (see --list-devices); none = the CPU; by default the "
        "first of --device")
    image_min_tokens: int = _media(-1, "--image-min-tokens LLAMA_ARG_IMAGE_MIN_TOKENS", min=-1,
        max=INT32_MAX,
        help="minimum number of tokens for an image, where it follows from the image's size; -1 = "
        "as the model says")
    image_max_tokens: int = _media(-1, "--image-max-tokens LLAMA_ARG_IMAGE_MAX_TOKENS", min=-1,
        max=INT32_MAX,
        help="maximum number of tokens for an image, where it follows from the image's size; -1 = "
        "as the model says")
    video_fps: float = _media(4.0, "--video-fps LLAMA_ARG_VIDEO_FPS", min=0, max=1000,
        help="frames to take of each second of a video; 0 = all")
    video_timestamp_interval: int = _media(5000,
        "--video-timestamp-interval LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL", min=0, max=INT32_MAX,
        help="interval at which a prompt names the time in a video, in milliseconds; 0 = never")
    media_path: str | None = _media(None, "--media-path", check=checks.directory,
        help="directory of files that requests may name, as file:// and their path in it")
    media_urls: tuple[str, ...] = _media((), check=parse_host,
        help="hosts, separated by commas, that requests may have files fetched from, over http and "
        "https; .example.org = all names below it; all = any host; HOST:PORT = at this port too; "
        "HOST=10.0.0.0/8 = a host whose addresses are in this range, where they would have to be "
        "public ones; by default none")
    media_max_bytes: int = _media(64 * 2**20, min=1,
        help="maximum size in bytes of a file with an image, sound or a video")
    media_max_pixels: int = _media(64 * 2**20, min=1,
        help="maximum number of pixels in an image or a frame")
    media_max_seconds: float = _media(3600.0, min=0.001,
        help="maximum length of sound or a video in seconds")
    media_max_frames: int = _media(256, min=1,
        help="maximum number of frames that are taken of a video")
    media_cache: int = _media(256, min=0,
        help="MiB of RAM for the embeddings of the latest images and sound, which need not be "
        "encoded again where the KV cache does not have them any more; 0 = none")
    media_timeout: float = _media(30.0, min=0.001,
        help="seconds that fetching a file may take, and processor seconds to decode one")
    media_background: str = _media("white", choices=("white", "none"),
        help="the background of transparent images; none = the hidden colors of their pixels")
    transcription_model: str | None = _media(None, check=checks.whisper_model,
        help="Whisper model that transcribes recordings in a separate process, instead of the "
        "loaded model: a directory, or a name such as small, which is downloaded; it needs "
        "trioserve[whisper]")
    transcription_prompt: str = _media("Transcribe audio to text",
        help="the instruction that the loaded model gets with a recording to transcribe")

    # -- Speech
    tts: str | None = _speech(None,
        help="model that speaks: the path or the address of a GGUF file, or a model on the hub, as "
        "for --hf-repo; none = no speech, not even with the bundled model")
    tts_mmproj: str | None = _speech(None,
        help="path or address of the speech model's projector, which makes the sound; by default "
        "the one on the hub, or beside the file")
    tts_voices: str | None = _speech(None, check=checks.directory,
        help="folder of recordings, each of a voice to speak with, by the name of the file")
    tts_speaker_file: str | None = _speech(None,
        help="recording of the voice to speak with by default; without it, the model's own")
    tts_lang: str | None = _speech(None,
        help="language to speak when a request names none, as an ISO 639-1 code such as en")

    # -- Embeddings
    embd_ctx_size: int = _embedding(2048, min=0,
        help="context for embeddings beside a model that generates text, in tokens; the first "
        "request for embeddings makes it; 0 = none")
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

    # -- Tools
    tools: tuple[str, ...] = _tool((), "--tools LLAMA_ARG_TOOLS", check=checks.tool,
        help="built-in tools, separated by commas, that the model and clients may use: read_file, "
        "file_glob_search, grep_search, exec_shell_command, write_file, edit_file, get_info; all = "
        "all of them")
    tools_dir: tuple[str, ...] = _tool((), check=checks.one_directory,
        help="directories, separated by commas, that these tools may read and write in; / = "
        "anywhere (as in llama-server); by default the one that the server is started in")
    tools_runtime: str | None = _tool(None, "--tools-runtime LLAMA_ARG_TOOLS_RUNTIME",
        help="where these tools run, if not on this machine: docker:IMAGE or podman:IMAGE, a "
        "container that the first call starts; docker-container:ID or podman-container:ID, one "
        "that runs already; ssh:TARGET, a host that takes the user's key")
    tools_max_processes: int = _tool(64, min=1,
        help="maximum number of processes of one command; it is ended when it has more")
    tools_max_memory: int = _tool(2 * 2**30, min=0,
        help="bytes of memory that the processes of one command may use together; it is ended when "
        "they use more; 0 = no limit")
    mcp_servers_config: str | None = _tool(None,
        "--mcp-servers-config LLAMA_ARG_MCP_SERVERS_CONFIG",
        help="JSON file with MCP servers whose tools the model and clients may use, in the form "
        "that Cursor reads; it needs trioserve[mcp]")
    mcp_servers_json: str | None = _tool(None, "--mcp-servers-json LLAMA_ARG_MCP_SERVERS_JSON",
        help="the same JSON in place of a file, or beside one")
    web_search: str | None = _tool(None, check=checks.web_search,
        help="search engine of the tool web_search: the address of a SearXNG, or brave or tavily, "
        "whose key is in BRAVE_API_KEY or TAVILY_API_KEY; without it, no client can search")
    web_search_key_file: str | None = _tool(None, help="file with that key")
    web_fetch: tuple[str, ...] = _tool((), check=parse_host,
        help="hosts whose pages the tool web_fetch may read, separated by commas and written as "
        "for --media-urls; all = any at a public address; by default none")
    agent: bool = _tool(False, "-ag --agent | -no-ag --no-agent LLAMA_ARG_AGENT",
        help="all built-in tools, and the proxy of --ui-mcp-proxy")
    ui_mcp_proxy: bool = _tool(False,
        "--ui-mcp-proxy --webui-mcp-proxy | --no-ui-mcp-proxy --no-webui-mcp-proxy "
        "LLAMA_ARG_UI_MCP_PROXY",
        help="let pages reach MCP servers of other origins through this server, at public "
        "addresses")
    ui_mcp_proxy_hosts: tuple[str, ...] = _tool((), check=parse_host,
        help="the only hosts that this proxy forwards to, separated by commas and written as for "
        "--media-urls; 127.0.0.1:3000=127.0.0.0/8 = a server on this machine; by default any "
        "public one")
    tool_max_steps: int = _tool(16, min=1,
        help="maximum number of answers that a request with trioserve_run_tools has the model "
        "give, the last one included")
    tool_approval_timeout: float = _tool(600.0, min=0.001,
        help="seconds that a call waits for a person's approval before it is refused")

    # -- Models
    models_dir: str | None = _models(None, "--models-dir LLAMA_ARG_MODELS_DIR",
        help="directory of GGUF files to choose from, instead of one model; files that belong "
        "together are in one subfolder")
    models_preset: str | None = _models(None, "--models-preset LLAMA_ARG_MODELS_PRESET",
        help="INI file with a section of flags for each model, and [*] for all of them")
    models_max: int = _models(4, "--models-max LLAMA_ARG_MODELS_MAX", min=0,
        help="number of models that are loaded at the same time; 0 = no limit")
    models_memory: int = _models(0, min=-1, synonyms={"auto": "-1"},
        help="MiB of memory for all models that are loaded, by llama.cpp's estimate; 0 = no limit, "
        "-1 or auto = what is free, as measured: a model that does not fit beside the others waits "
        "until idle ones are unloaded")
    models_downloads: int = _models(3, min=0,
        help="number of models that clients may have downloaded at the same time; 0 = none")
    models_autoload: bool = _models(True,
        "--models-autoload | --no-models-autoload LLAMA_ARG_MODELS_AUTOLOAD",
        help="load a model when a request names it")
    models_match: tuple[str, ...] = _models(("case", "part"), check=checks.match,
        help="how a name in a request may differ from that of a model, separated by commas; case = "
        "in its case, part = by being a part of that name only, exact = not at all")
    models_default: str | None = _models(None,
        help="name of the model for requests that name none or an unknown one; without it, these "
        "are refused with status 404")

    # -- Server
    host: str = _server("127.0.0.1", "--host LLAMA_ARG_HOST", check=checks.hosts,
        help="address to listen on, or the path of a Unix socket, which ends in .sock; several are "
        "separated by commas")
    port: int = _server(8080, "--port LLAMA_ARG_PORT", min=0, max=65535,
        help="port to listen on; 0 = any free port")
    api_keys: tuple[str, ...] = _server((), "--api-key LLAMA_API_KEY", check=checks.api_key,
        help="API keys, separated by commas; a client must send one of them; by default no key is "
        "needed")
    keys_file: str | None = _server(None, "--api-keys TRIOSERVE_API_KEYS",
        help="TOML file with a table for each further API key: its hash, its limits, and what it "
        "may do; trioserve keys writes it, and a server that runs reads it again when it changes")
    api_key_weights: tuple[float, ...] = _server((),
        help="relative share of the queue for each API key, in the same order; by default equal")
    api_key_priority: tuple[int, ...] = _server((),
        help="highest priority that each API key may ask for, in the same order; by default 0; "
        "without API keys, any client may ask for any priority")
    priority_order: str = _server("higher-first", choices=("higher-first", "lower-first"),
        help="which requests a priority moves ahead; lower-first = as in vLLM: the sign of the "
        "field priority is changed in every request")
    cache_sharing: str = _server("key", choices=("key", "all"),
        help="who shares what the cache holds of prompts: key = requests with the same API key; "
        "all = all requests, so that a client can find out what others have sent. Without API keys "
        "all share")
    store: str | None = _server(None, "--store",
        help="SQLite file in which stored responses, conversations, files and batches survive a "
        "restart; without it, they are kept in memory")
    store_size: int = _server(256 * 2**20, "--store-size", read=size, min=2**20,
        help="bytes to store, such as 256M or 4G; beyond that, the least recently used go first")
    store_days: float = _server(30.0, min=0.01, max=36500,
        help="days after its last use in which something is stored")
    slots_endpoint: bool = _server(True, "--slots | --no-slots LLAMA_ARG_ENDPOINT_SLOTS",
        help="serve GET /slots")
    slot_save_path: str | None = _server(None, "--slot-save-path", check=checks.directory,
        help="folder of the files that POST /slots saves and restores; without it, it does neither")
    metrics_endpoint: bool = _server(False, "--metrics LLAMA_ARG_ENDPOINT_METRICS",
        help="serve GET /metrics, for Prometheus")
    props_endpoint: bool = _server(False, "--props LLAMA_ARG_ENDPOINT_PROPS",
        help="serve POST /props, which does not change anything yet")
    sleep_idle_seconds: float = _server(-1.0, min=-1, check=checks.idle_seconds,
        help="seconds without a request after which the model's memory is freed, until the next "
        "request loads it again; -1 = never. A request may have its own, in keep_alive")
    predict_route: str = _server("", check=checks.route,
        help="path of a route in the form of Google's Vertex AI, which takes several requests in "
        "one; with AIP_MODE=PREDICTION in the environment, AIP_PREDICT_ROUTE or /predict")
    health_route: str = _server("", check=checks.route,
        help="another path for GET /health; with AIP_MODE=PREDICTION, AIP_HEALTH_ROUTE")
    sse_ping_interval: float = _server(30.0, "--sse-ping-interval LLAMA_ARG_SSE_PING_INTERVAL",
        min=-1, check=checks.ping_interval,
        help="seconds of silence after which a stream sends a comment as a ping, at least 0.1; -1 "
        "= never")

    # -- Network
    ssl_key_file: str | None = _network(None, "--ssl-key-file LLAMA_ARG_SSL_KEY_FILE",
        help="PEM file with the private key, for HTTPS")
    ssl_cert_file: str | None = _network(None, "--ssl-cert-file LLAMA_ARG_SSL_CERT_FILE",
        help="PEM file with the certificate, for HTTPS")
    reuse_port: bool = _network(False, "--reuse-port LLAMA_ARG_REUSE_PORT",
        help="allow several servers to listen on the same port")
    api_prefix: str = _network("", "--api-prefix LLAMA_ARG_API_PREFIX", read=path_prefix,
        check=checks.prefix, help="path in front of all routes, such as /llm")
    static_path: str | None = _network(None, "--path LLAMA_ARG_STATIC_PATH",
        help="directory of files to serve instead of the built-in page")
    ui: bool = _network(True, "--ui --webui | --no-ui --no-webui LLAMA_ARG_UI",
        help="serve the built-in page at /")
    ui_config: str | None = _network(None, "--ui-config --webui-config LLAMA_ARG_UI_CONFIG",
        check=checks.json_object, help="JSON object with defaults for the settings of the page")
    cors_origins: str = _network("localhost", "--cors-origins LLAMA_ARG_CORS_ORIGINS",
        check=checks.header,
        help="origins whose pages may use the API, separated by commas; localhost = those on this "
        "machine, * = all (llama-server's default)")
    cors_methods: str = _network("GET, POST, DELETE, OPTIONS",
        "--cors-methods LLAMA_ARG_CORS_METHODS", check=checks.header,
        help="methods that pages of other origins may use")
    cors_headers: str = _network(
        # The star is for those that SDKs add by themselves. It does not stand for the first.
        "Authorization, Content-Type, Last-Event-ID, Prefer, X-Api-Key, X-Conversation-Id, "
        "X-Request-Id, X-Request-Timeout, *",
        "--cors-headers LLAMA_ARG_CORS_HEADERS", check=checks.header,
        help="headers that pages of other origins may send; * = any")
    cors_credentials: bool = _network(False,
        "--cors-credentials | --no-cors-credentials LLAMA_ARG_CORS_CREDENTIALS",
        help="let pages of other origins send credentials")
    allowed_hosts: tuple[str, ...] = _network((),
        help="names, separated by commas, that a server without API keys answers to on a loopback "
        "address, beside localhost; .example.org = all names below it; * = any name")

    # -- Limits
    timeout: float = _limit(60.0, "-to --timeout LLAMA_ARG_TIMEOUT", min=0.001,
        help="seconds that a client has to send the body of a request; for reading the response, "
        "see --stall-timeout")
    max_queue: int = _limit(1024, min=0,
        help="maximum number of requests that wait for a slot; more are refused with status 429")
    max_queue_per_key: int = _limit(0, min=0,
        help="how many may be of the same API key; 0 = an equal share of --max-queue, at least 1")
    max_queue_tokens: int = _limit(0, min=0,
        help="maximum number of prompt tokens in all waiting requests together; each API key has "
        "the same share of them as of --max-queue; 0 = no limit")
    rate_limit_requests: int = _limit(0, min=0,
        help="requests a minute for each API key, or without keys for each address; 0 = no limit")
    rate_limit_tokens: int = _limit(0, min=0,
        help="tokens a minute, of prompts and outputs, for each API key, or without keys for each "
        "address; 0 = no limit")
    max_logprobs: int = _limit(20, min=1, max=1024,
        help="maximum number of candidates that logprobs and top_logprobs ask for, for each token; "
        "n_probs of llama-server's own routes may be 1024 in any case")
    drain_timeout: float = _limit(30.0, min=0,
        help="seconds that running requests have to finish after SIGTERM")
    unread_tokens: int = _limit(256, min=1, max=2**20,
        help="tokens that a client may leave unread before its request is paused, without a slot")
    stall_timeout: float = _limit(30.0, min=0.001,
        help="seconds that a request may stay paused before it is cancelled")
    keep_alive_timeout: float = _limit(75.0, min=0.001,
        help="seconds after which an idle connection is closed")
    watchdog_timeout: float = _limit(120.0, min=0,
        help="seconds that a step of the engine may take before /health/live answers with status "
        "503; 0 = no limit")
    on_engine_failure: str = _limit("exit", choices=("exit", "stay"),
        help="what to do when an exception has broken the engine; exit = end the process with "
        "exit code 1, stay = continue, and answer with errors")
    max_connections: int = _limit(0, min=0,
        help="connections that may be open; for a further one, the address with most of them loses "
        "one that waits for its client, and if all are busy, the new one gets status 503; 0 = the "
        "limit of descriptors, less 64 for files")
    max_body_size: int = _limit(100 * 2**20, min=1,
        help="maximum size of a request body in bytes; images and sound in it are in base64, which "
        "takes a third more")
    max_request_memory: int = _limit(512 * 2**20, min=2**20,
        help="bytes that all requests together may hold, by estimate: bodies, what is made of "
        "them, and prompts; more are refused with status 503")
    stream_sessions: int = _limit(512, min=1,
        help="streams that may be resumed, running or finished; beyond that the one that finished "
        "first is forgotten, or if none has, a new one is refused with status 429. Of several API "
        "keys, one has half of them at most")
    stream_bytes: int = _limit(4 * 2**20, min=2**12,
        help="bytes that are kept of each such stream: its newest events")
    stream_total_bytes: int = _limit(256 * 2**20, min=2**12,
        help="bytes that all such streams keep; beyond that, the client with most loses some")
    stream_keep_seconds: float = _limit(300.0, min=1,
        help="seconds after its end in which such a stream can still be read")

    # -- Logs
    log_format: str = _log("auto", choices=("auto", "pretty", "json"),
        help="format of log lines; auto = pretty on a terminal, JSON otherwise")
    log_level: str = _log("info", choices=("debug", "info", "warning", "error", "off"),
        help="lowest level to log; off = log nothing")
    log_file: str | None = _log(None, "--log-file LLAMA_ARG_LOG_FILE",
        help="file that log lines are appended to as well, as JSON")
    log_prompts_dir: str | None = _log(None, "--log-prompts-dir",
        help="directory in which each prompt is kept as a separate file, for debugging")
    log_colors: str = _log("auto", "--log-colors LLAMA_ARG_LOG_COLORS",
        choices=("auto", "on", "off"),
        help="whether pretty log lines have colors; auto = on a terminal")
    log_prefix: bool = _log(True, "--log-prefix | --no-log-prefix LLAMA_ARG_LOG_PREFIX",
        help="begin each log line with its level, and in JSON with its source")
    log_timestamps: bool = _log(True,
        "--log-timestamps | --no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS",
        help="begin each log line with its time")
    otel: bool = _log(False, "--otel | --no-otel TRIOSERVE_OTEL",
        help="send traces and metrics by OpenTelemetry, to where OTEL_EXPORTER_OTLP_ENDPOINT and "
        "the other variables of OpenTelemetry say")
    otel_content: bool = _log(False, "--otel-content | --no-otel-content TRIOSERVE_OTEL_CONTENT",
        help="with --otel, have prompts and outputs in the traces; anyone who can read these reads "
        "what people wrote")
    # fmt: on

    def __attrs_post_init__(self) -> None:
        checks.check_each(self)
        checks.check_together(self)

    @property
    def model_named(self) -> str | None:
        """The model's name from any of the fields; None: the bundled model."""
        return self.hf_repo or self.model_url or self.model

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def has_several_keys(self) -> bool:
        """There are several API keys, or may be, as in a file."""
        return len(self.api_keys) > 1 or self.keys_file is not None

    @property
    def aliases(self) -> tuple[str, ...]:
        return names(self.alias or "")

    @property
    def control_vector_files(self) -> tuple[tuple[str, float], ...]:
        return tuple(parse_adapter(text, "control_vector") for text in self.control_vector)

    @property
    def lora_files(self) -> tuple[tuple[str, float], ...]:
        applied = 0.0 if self.lora_init_without_apply else 1.0
        return tuple((path, scale * applied) for path, scale in map(parse_adapter, self.lora))

    @property
    def has_draft_model(self) -> bool:
        return self.spec_draft_model is not None or self.spec_draft_hf is not None

    @property
    def draft_types(self) -> tuple[str, ...]:
        """The types of speculative decoding, in the order of their use."""
        named = self.spec_type if self.spec_type != ("auto",) else ("ngram-simple", "auto")
        ngrams = [one for one in named if one.startswith(("auto", "ngram"))]
        simple = "draft-simple" if self.has_draft_model and not self.head_types else None
        return tuple(dict.fromkeys(filter(None, (*ngrams, self.head_type, simple))))

    @property
    def head_type(self) -> str | None:
        """The type of drafts by a head, if there are any, and it is not left open."""
        return None if "auto" in self.spec_type else next(iter(self.head_types), None)

    @property
    def head_types(self) -> tuple[str, ...]:
        """The types of drafts by a head that there may be, the preferred one first."""
        named = checks.HEADS if "auto" in self.spec_type else self.spec_type
        return tuple(one for one in checks.HEADS if one in named)

    @property
    def serves_embeddings(self) -> bool:
        """The server computes embeddings or rankings, and no text."""
        return self.embeddings or self.reranking

    @property
    def template_variables(self) -> dict[str, Any]:
        """The configured variables of the chat template; a request may set others."""
        variables: dict[str, Any] = {"preserve_reasoning": self.reasoning_preserve}
        if self.reasoning != "auto":
            variables["enable_thinking"] = self.reasoning == "on"
        if self.reasoning_effort != "default":
            variables["reasoning_effort"] = self.reasoning_effort
        variables.update(json.loads(self.chat_template_kwargs or "{}"))
        return variables

    @property
    def builtin_tools(self) -> tuple[str, ...]:
        """The names of the enabled built-in tools, in the order of `BUILTIN_TOOLS`."""
        if self.agent or ALL_TOOLS in self.tools:
            return BUILTIN_TOOLS
        return tuple(name for name in BUILTIN_TOOLS if name in self.tools)

    @property
    def has_mcp_servers(self) -> bool:
        return self.mcp_servers_config is not None or self.mcp_servers_json is not None

    @property
    def has_web_tools(self) -> bool:
        """True if the server may search the web or read web pages."""
        return self.web_search is not None or bool(self.web_fetch)

    @property
    def has_tools(self) -> bool:
        """True if the server may run tools: built-in ones, web tools or those of MCP servers."""
        return bool(self.builtin_tools) or self.has_web_tools or self.has_mcp_servers

    @property
    def has_mcp_proxy(self) -> bool:
        """Web pages may reach MCP servers through this one."""
        return self.ui_mcp_proxy or self.agent

    def mcp_servers(self) -> dict[str, Any]:
        """Read the descriptions of MCP servers; see `read_mcp_servers`."""
        return read_mcp_servers(self.mcp_servers_config, self.mcp_servers_json)
