"""`Tuning`: the options that llama.cpp gets as they are: devices, layers, positions.

They are a part of `trioserve.config.Config`. The names are llama-server's.
"""

from __future__ import annotations

import attrs

from trioserve.config.option import option
from trioserve.errors import ConfigError

#: Bytes that llama.cpp has for a key of the metadata, and for a text, each with a null at its end.
_OVERRIDE_SIZE = 128


@attrs.frozen
class Override:
    """A value that takes the place of one in the metadata of the file."""

    key: str
    kind: str  # "int", "float", "bool" or "str"
    value: int | float | bool | str


def parse_override(text: str) -> Override:
    """Read ``KEY=TYPE:VALUE``.

    Raises:
        ConfigError: it is not that, or does not fit in the place that llama.cpp has for it.
    """
    key, _, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not key or not colon or kind not in ("int", "float", "bool", "str"):
        raise ConfigError(f"override_kv holds {text!r}, and must be KEY=TYPE:VALUE, with the type "
                          "int, float, bool or str")  # fmt: skip
    if max(len(key.encode()), len(value.encode())) >= _OVERRIDE_SIZE:
        raise ConfigError(f"override_kv: the key and the value of {key[:40]!r} must each be "
                          f"shorter than {_OVERRIDE_SIZE} bytes")  # fmt: skip
    if kind == "str":
        return Override(key, kind, value)
    if kind == "bool":
        if value not in ("true", "false"):
            raise ConfigError(f"override_kv: {key} is {value!r}, and must be true or false")
        return Override(key, kind, value == "true")
    number = float if kind == "float" else int
    try:
        return Override(key, kind, number(value))
    except ValueError:
        raise ConfigError(f"override_kv: {key} is {value!r}, which is no {kind}") from None


def parse_placement(text: str) -> tuple[str, str]:
    """Read ``PATTERN=BUFFER``: a regular expression for names of tensors, and where they go.

    Raises:
        ConfigError: it is not that.
    """
    pattern, _, buffer = text.partition("=")
    if not pattern or not buffer:
        raise ConfigError(f"override_tensor holds {text!r}, and must be PATTERN=BUFFER")
    return pattern, buffer


@attrs.frozen(kw_only=True, slots=False)  # `Config` has several such bases
class Tuning:
    """GenerationParams for llama.cpp. The defaults are its own."""

    # -- Model
    lazy_mode: str = option(
        "auto",
        "-lzm",
        "--lazy-mode",
        group="Devices",
        env="LLAMA_ARG_LAZY_MODE",
        choices=("auto", "on", "off"),
        help="read rows of large tensors when they are needed; auto: of those above 4 GiB",
    )
    override_kv: tuple[str, ...] = option(
        (),
        "--override-kv",
        group="Devices",
        help="metadata of the model to replace, as KEY=TYPE:VALUE with the type int, float, bool "
        "or str, separated by commas",
    )

    # -- Devices
    device: tuple[str, ...] = option(
        (),
        "-dev",
        "--device",
        group="Devices",
        env="LLAMA_ARG_DEVICE",
        help="devices to compute on, separated by commas; none: the CPU; see --list-devices",
    )
    split_mode: str = option(
        "layer",
        "-sm",
        "--split-mode",
        group="Devices",
        env="LLAMA_ARG_SPLIT_MODE",
        choices=("none", "layer", "row", "tensor"),
        help="how several GPUs share the model",
    )
    tensor_split: tuple[float, ...] = option(
        (),
        "-ts",
        "--tensor-split",
        group="Devices",
        env="LLAMA_ARG_TENSOR_SPLIT",
        help="the share of each GPU, such as 3,1",
    )
    main_gpu: int = option(
        0,
        "-mg",
        "--main-gpu",
        group="Devices",
        env="LLAMA_ARG_MAIN_GPU",
        least=0,
        most=255,
        help="the GPU that has all of the model where --split-mode is none",
    )
    override_tensor: tuple[str, ...] = option(
        (),
        "-ot",
        "--override-tensor",
        group="Devices",
        env="LLAMA_ARG_OVERRIDE_TENSOR",
        help="tensors to keep elsewhere, as PATTERN=BUFFER, separated by commas",
    )
    cpu_moe: bool = option(
        False,
        "-cmoe",
        "--cpu-moe",
        group="Devices",
        env="LLAMA_ARG_CPU_MOE",
        help="keep the weights of all experts in the memory of the CPU",
        off=(),
    )
    n_cpu_moe: int = option(
        0,
        "-ncmoe",
        "--n-cpu-moe",
        group="Devices",
        env="LLAMA_ARG_N_CPU_MOE",
        least=0,
        most=1024,
        help="keep those of the first N layers there",
    )
    n_cpu_ffn: int = option(
        0,
        "-ncffn",
        "--n-cpu-ffn",
        group="Devices",
        env="LLAMA_ARG_N_CPU_FFN",
        least=0,
        most=1024,
        help="keep the dense feed-forward weights of the first N layers there",
    )
    kv_offload: bool = option(
        True,
        "-kvo",
        "--kv-offload",
        group="Devices",
        env="LLAMA_ARG_KV_OFFLOAD",
        help="keep the KV cache on the GPU",
        off=("-nkvo", "--no-kv-offload"),
    )
    op_offload: bool = option(
        True,
        "--op-offload",
        group="Devices",
        help="let the GPU work on tensors of the CPU where that is faster",
    )
    repack: bool = option(
        True,
        "--repack",
        group="Devices",
        env="LLAMA_ARG_REPACK",
        help="order the weights anew for the CPU, when they are loaded",
        off=("-nr", "--no-repack"),
    )
    no_host: bool = option(
        False,
        "--no-host",
        group="Devices",
        env="LLAMA_ARG_NO_HOST",
        help="do not keep weights in the host memory of a GPU",
        off=(),
    )
    numa: str = option(
        "none",
        "--numa",
        group="Devices",
        env="LLAMA_ARG_NUMA",
        choices=("none", "distribute", "isolate", "numactl"),
        help="how threads are spread over the nodes of a NUMA machine",
    )

    # -- Long contexts
    rope_scaling: str = option(
        "auto",
        "--rope-scaling",
        group="Long contexts",
        env="LLAMA_ARG_ROPE_SCALING_TYPE",
        choices=("auto", "none", "linear", "yarn"),
        help="how positions beyond the training context are scaled; auto: as the model says",
    )
    rope_freq_base: float = option(
        0.0,
        "--rope-freq-base",
        group="Long contexts",
        env="LLAMA_ARG_ROPE_FREQ_BASE",
        least=0,
        help="base frequency of RoPE; 0: the model's",
    )
    rope_freq_scale: float = option(
        0.0,
        "--rope-freq-scale",
        group="Long contexts",
        env="LLAMA_ARG_ROPE_FREQ_SCALE",
        least=0,
        help="factor on the frequencies of RoPE: 0.5 makes room for twice the context; 0: the "
        "model's",
    )
    yarn_orig_ctx: int = option(
        0,
        "--yarn-orig-ctx",
        group="Long contexts",
        env="LLAMA_ARG_YARN_ORIG_CTX",
        least=0,
        most=2**31 - 1,
        help="YaRN: the training context; 0: as the model says",
    )
    yarn_ext_factor: float = option(
        -1.0,
        "--yarn-ext-factor",
        group="Long contexts",
        env="LLAMA_ARG_YARN_EXT_FACTOR",
        help="YaRN: share of extrapolation; negative: the model's",
    )
    yarn_attn_factor: float = option(
        -1.0,
        "--yarn-attn-factor",
        group="Long contexts",
        env="LLAMA_ARG_YARN_ATTN_FACTOR",
        help="YaRN: factor on the attention's magnitude; negative: the model's",
    )
    yarn_beta_slow: float = option(
        -1.0,
        "--yarn-beta-slow",
        group="Long contexts",
        env="LLAMA_ARG_YARN_BETA_SLOW",
        help="YaRN: the high correction dimension; negative: the model's",
    )
    yarn_beta_fast: float = option(
        -1.0,
        "--yarn-beta-fast",
        group="Long contexts",
        env="LLAMA_ARG_YARN_BETA_FAST",
        help="YaRN: the low correction dimension; negative: the model's",
    )
    swa_full: bool = option(
        False,
        "--swa-full",
        group="Long contexts",
        env="LLAMA_ARG_SWA_FULL",
        help="keep all of a sequence also in layers with a sliding window, which lets prompts be "
        "reused from any position",
        off=(),
    )

    def __attrs_post_init__(self) -> None:
        """Refuse texts that cannot be read. Raises ConfigError."""
        for text in self.override_kv:
            parse_override(text)
        for text in self.override_tensor:
            parse_placement(text)
