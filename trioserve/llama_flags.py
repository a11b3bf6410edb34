"""The flags and variables of llama-server that trioserve does not act on.

Two kinds. Some cannot matter here, because what they ask for is how trioserve works anyway: these
are accepted, and a note says why they change nothing. All others are refused, so that nobody
believes in a setting that has no effect. The names are those of the llama.cpp that
llama-cpp-python 0.3.36 carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import attrs

#: Flags that are accepted and change nothing, and why.
NO_EFFECT: Mapping[str, str] = {
    "--threads-http": "one event loop serves all connections",
    "--no-ui": "there is no page to switch off",
    "--no-webui": "there is no page to switch off",
    "--jinja": "chat templates are always run as Jinja",
    "-cb": "requests are always batched together as they come",
    "--cont-batching": "requests are always batched together as they come",
    "--warmup": "there is no warm-up run",
    "--no-warmup": "there is no warm-up run",
    "--perf": "timings are always measured",
    "--no-perf": "timings are always measured, and cost nothing",
    "-e": "there is no prompt on the command line",
    "--escape": "there is no prompt on the command line",
    "--no-escape": "there is no prompt on the command line",
    "--offline": "nothing is ever downloaded",
    "--no-mmproj": "only text is read",
    "--no-mmproj-auto": "only text is read",
    "--mmproj-offload": "only text is read",
    "--no-mmproj-offload": "only text is read",
    "--no-agent": "no tools are run by the server",
    "-no-ag": "no tools are run by the server",
    "--no-ui-mcp-proxy": "there is no such proxy",
    "--no-webui-mcp-proxy": "there is no such proxy",
    "--no-cors-credentials": "no CORS headers are sent",
    "--no-models-autoload": "there is one model",
    "--no-skip-chat-parsing": "the output of a chat is always parsed",
    "--no-spec-draft-backend-sampling": "there is no draft model",
    "--log-prefix": "each line of the log has its level",
    "--log-timestamps": "each line of the log has its time",
    "--kv-offload": "llama.cpp does so by default",
    "-kvo": "llama.cpp does so by default",
    "--repack": "llama.cpp does so by default",
    "--op-offload": "llama.cpp does so by default",
    "-dt": "llama.cpp no longer uses it",
    "--defrag-thold": "llama.cpp no longer uses it",
}

#: Those of them that take a value.
TAKES_VALUE = frozenset({"--threads-http", "-dt", "--defrag-thold"})

# One option a line: its flags, its negative flags after a bar, its variable.
_OPTIONS = """
-cl --cache-list
--completion-bash
-C --cpu-mask
-Cr --cpu-range
--cpu-strict
--prio
--poll
-Cb --cpu-mask-batch
-Crb --cpu-range-batch
--cpu-strict-batch
--prio-batch
--poll-batch
--keep
--swa-full LLAMA_ARG_SWA_FULL
--perf | --no-perf LLAMA_ARG_PERF
-e --escape | --no-escape
--rope-scaling LLAMA_ARG_ROPE_SCALING_TYPE
--rope-scale LLAMA_ARG_ROPE_SCALE
--rope-freq-base LLAMA_ARG_ROPE_FREQ_BASE
--rope-freq-scale LLAMA_ARG_ROPE_FREQ_SCALE
--yarn-orig-ctx LLAMA_ARG_YARN_ORIG_CTX
--yarn-ext-factor LLAMA_ARG_YARN_EXT_FACTOR
--yarn-attn-factor LLAMA_ARG_YARN_ATTN_FACTOR
--yarn-beta-slow LLAMA_ARG_YARN_BETA_SLOW
--yarn-beta-fast LLAMA_ARG_YARN_BETA_FAST
-kvo --kv-offload | -nkvo --no-kv-offload LLAMA_ARG_KV_OFFLOAD
--repack | -nr --no-repack LLAMA_ARG_REPACK
--no-host LLAMA_ARG_NO_HOST
-dt --defrag-thold LLAMA_ARG_DEFRAG_THOLD
--rpc LLAMA_ARG_RPC
-lzm --lazy-mode LLAMA_ARG_LAZY_MODE
--numa LLAMA_ARG_NUMA
-dev --device LLAMA_ARG_DEVICE
--list-devices
-ot --override-tensor LLAMA_ARG_OVERRIDE_TENSOR
-cmoe --cpu-moe LLAMA_ARG_CPU_MOE
-ncmoe --n-cpu-moe LLAMA_ARG_N_CPU_MOE
-ncffn --n-cpu-ffn LLAMA_ARG_N_CPU_FFN
-sm --split-mode LLAMA_ARG_SPLIT_MODE
-ts --tensor-split LLAMA_ARG_TENSOR_SPLIT
-mg --main-gpu LLAMA_ARG_MAIN_GPU
-fit --fit LLAMA_ARG_FIT
-fitt --fit-target LLAMA_ARG_FIT_TARGET
-fitc --fit-ctx LLAMA_ARG_FIT_CTX
--override-kv
--op-offload | --no-op-offload
--lora
--lora-scaled
--control-vector
--control-vector-scaled
--control-vector-layer-range
-mu --model-url LLAMA_ARG_MODEL_URL
-dr --docker-repo LLAMA_ARG_DOCKER_REPO
-hf -hfr --hf-repo LLAMA_ARG_HF_REPO
-hff --hf-file LLAMA_ARG_HF_FILE
-hft --hf-token
--log-disable
--log-file LLAMA_ARG_LOG_FILE
--log-colors LLAMA_ARG_LOG_COLORS
--offline LLAMA_ARG_OFFLINE
--log-prefix | --no-log-prefix LLAMA_ARG_LOG_PREFIX
--log-timestamps | --no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS
--spec-draft-type-k -ctkd --cache-type-k-draft LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K
--spec-draft-type-v -ctvd --cache-type-v-draft LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V
--grammar
--grammar-file
-j --json-schema
-jf --json-schema-file
-bs --backend-sampling LLAMA_ARG_BACKEND_SAMPLING
-lcs --lookup-cache-static
-lcd --lookup-cache-dynamic
--kv-unified-per-slot LLAMA_ARG_KV_UNIFIED_PER_SLOT
-ctxcp --ctx-checkpoints --swa-checkpoints LLAMA_ARG_CTX_CHECKPOINTS
-cms --checkpoint-min-step LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT
--cache-idle-slots | --no-cache-idle-slots LLAMA_ARG_CACHE_IDLE_SLOTS
-r --reverse-prompt
-sp --special
--warmup | --no-warmup
--spm-infill
--pooling LLAMA_ARG_POOLING
-cb --cont-batching | -nocb --no-cont-batching LLAMA_ARG_CONT_BATCHING
-mm --mmproj LLAMA_ARG_MMPROJ
-mmu --mmproj-url LLAMA_ARG_MMPROJ_URL
--mmproj-auto | --no-mmproj --no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO
--mmproj-offload | --no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD
-mmdev --mmproj-device
--image-min-tokens LLAMA_ARG_IMAGE_MIN_TOKENS
--image-max-tokens LLAMA_ARG_IMAGE_MAX_TOKENS
--mtmd-batch-max-tokens LLAMA_ARG_MTMD_BATCH_MAX_TOKENS
--video-fps LLAMA_ARG_VIDEO_FPS
--video-timestamp-interval LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL
--video-ffmpeg-dir LLAMA_ARG_VIDEO_FFMPEG_DIR
--tags LLAMA_ARG_TAGS
--embd-normalize
--reuse-port LLAMA_ARG_REUSE_PORT
--path LLAMA_ARG_STATIC_PATH
--cors-origins LLAMA_ARG_CORS_ORIGINS
--cors-methods LLAMA_ARG_CORS_METHODS
--cors-headers LLAMA_ARG_CORS_HEADERS
--cors-credentials | --no-cors-credentials LLAMA_ARG_CORS_CREDENTIALS
--api-prefix LLAMA_ARG_API_PREFIX
--ui-config --webui-config LLAMA_ARG_UI_CONFIG
--ui-config-file --webui-config-file LLAMA_ARG_UI_CONFIG_FILE
--ui-mcp-proxy --webui-mcp-proxy | --no-ui-mcp-proxy --no-webui-mcp-proxy LLAMA_ARG_UI_MCP_PROXY
--tools LLAMA_ARG_TOOLS
--tools-runtime LLAMA_ARG_TOOLS_RUNTIME
--mcp-servers-config LLAMA_ARG_MCP_SERVERS_CONFIG
--mcp-servers-json LLAMA_ARG_MCP_SERVERS_JSON
-ag --agent | -no-ag --no-agent LLAMA_ARG_AGENT
--ui --webui | --no-ui --no-webui LLAMA_ARG_UI
--embedding --embeddings LLAMA_ARG_EMBEDDINGS
--rerank --reranking LLAMA_ARG_RERANKING
--ssl-key-file LLAMA_ARG_SSL_KEY_FILE
--ssl-cert-file LLAMA_ARG_SSL_CERT_FILE
--chat-template-kwargs LLAMA_ARG_CHAT_TEMPLATE_KWARGS
-to --timeout LLAMA_ARG_TIMEOUT
--threads-http LLAMA_ARG_THREADS_HTTP
--cache-reuse LLAMA_ARG_CACHE_REUSE
--metrics LLAMA_ARG_ENDPOINT_METRICS
--props LLAMA_ARG_ENDPOINT_PROPS
--slot-save-path
--media-path
--models-dir LLAMA_ARG_MODELS_DIR
--models-preset LLAMA_ARG_MODELS_PRESET
--models-max LLAMA_ARG_MODELS_MAX
--models-autoload | --no-models-autoload LLAMA_ARG_MODELS_AUTOLOAD
--jinja | --no-jinja LLAMA_ARG_JINJA
--reasoning-format LLAMA_ARG_THINK
-rea --reasoning LLAMA_ARG_REASONING
--reasoning-effort LLAMA_ARG_REASONING_EFFORT
--reasoning-budget LLAMA_ARG_THINK_BUDGET
--reasoning-budget-message LLAMA_ARG_THINK_BUDGET_MESSAGE
--reasoning-preserve | --no-reasoning-preserve LLAMA_ARG_REASONING_PRESERVE
--skip-chat-parsing | --no-skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING
--prefill-assistant | --no-prefill-assistant LLAMA_ARG_PREFILL_ASSISTANT
-sps --slot-prompt-similarity
--lora-init-without-apply
--sleep-idle-seconds
--log-prompts-dir
--spec-draft-hf -hfd -hfrd --hf-repo-draft LLAMA_ARG_SPEC_DRAFT_HF_REPO
--spec-draft-threads -td --threads-draft
--spec-draft-threads-batch -tbd --threads-batch-draft
--spec-draft-cpu-mask -Cd --cpu-mask-draft
--spec-draft-cpu-range -Crd --cpu-range-draft
--spec-draft-cpu-strict --cpu-strict-draft
--spec-draft-prio --prio-draft
--spec-draft-poll --poll-draft
--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft
--spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft
--spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-cpu-moe -cmoed --cpu-moe-draft LLAMA_ARG_SPEC_DRAFT_CPU_MOE
--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE
--spec-draft-n-max LLAMA_ARG_SPEC_DRAFT_N_MAX
--spec-draft-n-min LLAMA_ARG_SPEC_DRAFT_N_MIN
--spec-synth-len LLAMA_ARG_SPEC_SYNTH_LEN
--spec-synth-rates LLAMA_ARG_SPEC_SYNTH_RATES
--spec-draft-p-split --draft-p-split LLAMA_ARG_SPEC_DRAFT_P_SPLIT
--spec-draft-p-min --draft-p-min LLAMA_ARG_SPEC_DRAFT_P_MIN
--spec-draft-backend-sampling | --no-spec-draft-backend-sampling LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING
--spec-draft-device -devd --device-draft
--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft LLAMA_ARG_N_GPU_LAYERS_DRAFT
--spec-draft-model -md --model-draft LLAMA_ARG_SPEC_DRAFT_MODEL
--spec-type LLAMA_ARG_SPEC_TYPE
--spec-ngram-mod-n-min
--spec-ngram-mod-n-max
--spec-ngram-mod-n-match
--spec-ngram-simple-size-n
--spec-ngram-simple-size-m
--spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n
--spec-ngram-map-k-size-m
--spec-ngram-map-k-min-hits
--spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m
--spec-ngram-map-k4v-min-hits
--draft --draft-n --draft-max LLAMA_ARG_DRAFT_MAX
--draft-min --draft-n-min LLAMA_ARG_DRAFT_MIN
--spec-ngram-size-n
--spec-ngram-size-m
--spec-ngram-min-hits
--embd-gemma-default
--fim-qwen-1.5b-default
--fim-qwen-3b-default
--fim-qwen-7b-default
--fim-qwen-7b-spec
--fim-qwen-14b-spec
--fim-qwen-30b-default
--gpt-oss-20b-default
--gpt-oss-120b-default
--vision-gemma-4b-default
--vision-gemma-12b-default
--spec-default
"""  # noqa: E501


@attrs.frozen
class Foreign:
    """An option of llama-server that trioserve does not act on."""

    positive: tuple[str, ...]
    negative: tuple[str, ...]
    variable: str | None


@cache
def options() -> tuple[Foreign, ...]:
    """All of them, in llama-server's order."""
    found = []
    for line in _OPTIONS.strip().splitlines():
        positive, _, rest = line.partition("|")
        words = positive.split()
        variable = words.pop() if words[-1].startswith("LLAMA_") else None
        others = rest.split()
        if others and others[-1].startswith("LLAMA_"):
            variable = others.pop()
        found.append(Foreign(tuple(words), tuple(others), variable))
    return tuple(found)


@cache
def flags() -> frozenset[str]:
    """The names of all their flags."""
    return frozenset(name for one in options() for name in (*one.positive, *one.negative))


@cache
def variables() -> Mapping[str, tuple[str, str | None]]:
    """Each variable, with the flag that it stands for and that flag's opposite, if it has one."""
    return {
        one.variable: (one.positive[0], one.negative[0] if one.negative else None)
        for one in options()
        if one.variable is not None
    }
