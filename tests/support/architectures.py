"""The metadata and tensors that llama.cpp wants of a model file, by architecture.

Sizes are those of `tests.support.tiny_models`, which writes the files. Shapes are in the order of
NumPy: of a matrix the outputs come first, then the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

WIDTH, LAYERS, FFN, VOCAB = 32, 4, 64, 512
HEADS, KV_HEADS, HEAD = 4, 2, 8
WINDOW = 16
CONTEXT = 4096

Shape = tuple[int, ...]
Value = int | float | bool | str | Sequence[int]


@attrs.frozen
class Architecture:
    """One kind of model.

    Attributes:
        name: `general.architecture`.
        metadata: entries whose keys begin with the name, without it.
        tensors: those outside the layers, by name.
        layers: the tensors of each layer; their names get the layer's prefix.
    """

    name: str
    metadata: Mapping[str, Value]
    layers: Sequence[Mapping[str, Shape]]
    tensors: Mapping[str, Shape] = attrs.field(
        factory=lambda: {**_EMBEDDING, "output_norm.weight": (WIDTH,)}
    )


_EMBEDDING = {"token_embd.weight": (VOCAB, WIDTH), "output.weight": (VOCAB, WIDTH)}

# -- metadata

_EVERY: Mapping[str, Value] = {
    "context_length": CONTEXT,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": FFN,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
_HEADS: Mapping[str, Value] = {
    **_EVERY,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": HEAD,
    "rope.freq_base": 10000.0,
}
_EXPERTS, _EXPERT_FFN = 4, 32
_SPARSE: Mapping[str, Value] = {
    "expert_count": _EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": _EXPERT_FFN,
}
#: Every second layer sees the window only.
_WINDOWED: Mapping[str, Value] = {
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": 2,
}
_INNER, _STATE, _KERNEL, _SSM_HEADS, _GROUPS = 2 * WIDTH, 16, 4, 4, 1
_SSM: Mapping[str, Value] = {
    "ssm.conv_kernel": _KERNEL,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _SSM_HEADS,
    "ssm.group_count": _GROUPS,
}

# -- the parts of a layer

_ATTENTION: Mapping[str, Shape] = {
    "attn_norm.weight": (WIDTH,),
    "attn_q.weight": (HEADS * HEAD, WIDTH),
    "attn_k.weight": (KV_HEADS * HEAD, WIDTH),
    "attn_v.weight": (KV_HEADS * HEAD, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
}
_QK_NORMS: Mapping[str, Shape] = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
_DENSE: Mapping[str, Shape] = {
    "ffn_gate.weight": (FFN, WIDTH),
    "ffn_up.weight": (FFN, WIDTH),
    "ffn_down.weight": (WIDTH, FFN),
}
_MOE: Mapping[str, Shape] = {
    "ffn_gate_inp.weight": (_EXPERTS, WIDTH),
    "ffn_gate_exps.weight": (_EXPERTS, _EXPERT_FFN, WIDTH),
    "ffn_up_exps.weight": (_EXPERTS, _EXPERT_FFN, WIDTH),
    "ffn_down_exps.weight": (_EXPERTS, WIDTH, _EXPERT_FFN),
}
_SHARED_EXPERT: Mapping[str, Shape] = {
    "ffn_gate_shexp.weight": (_EXPERT_FFN, WIDTH),
    "ffn_up_shexp.weight": (_EXPERT_FFN, WIDTH),
    "ffn_down_shexp.weight": (WIDTH, _EXPERT_FFN),
}
_FFN_NORM: Mapping[str, Shape] = {"ffn_norm.weight": (WIDTH,)}
_CONVOLVED = _INNER + 2 * _GROUPS * _STATE
_MAMBA2: Mapping[str, Shape] = {
    "attn_norm.weight": (WIDTH,),
    "ssm_in.weight": (_INNER + _CONVOLVED + _SSM_HEADS, WIDTH),
    "ssm_conv1d.weight": (_CONVOLVED, _KERNEL),
    "ssm_conv1d.bias": (_CONVOLVED,),
    "ssm_dt.bias": (_SSM_HEADS,),
    "ssm_a": (_SSM_HEADS, 1),
    "ssm_d": (_SSM_HEADS, 1),
    "ssm_norm.weight": (_GROUPS, _INNER // _GROUPS),
    "ssm_out.weight": (WIDTH, _INNER),
}

# -- the architectures

_LLAMA = Architecture("llama", _HEADS, [_ATTENTION | _FFN_NORM | _DENSE] * LAYERS)

_QWEN3 = Architecture("qwen3", _HEADS, [_ATTENTION | _QK_NORMS | _FFN_NORM | _DENSE] * LAYERS)

#: Positions have sections (M-RoPE), which differ where an image is.
QWEN2VL = Architecture(
    "qwen2vl",
    {**_HEADS, "rope.dimension_sections": [2, 1, 1, 0]},
    [
        _ATTENTION
        | _FFN_NORM
        | _DENSE
        | {
            "attn_q.bias": (HEADS * HEAD,),
            "attn_k.bias": (KV_HEADS * HEAD,),
            "attn_v.bias": (KV_HEADS * HEAD,),
        }
    ]
    * LAYERS,
)

_QWEN3_MOE = Architecture(
    "qwen3moe", {**_HEADS, **_SPARSE}, [_ATTENTION | _QK_NORMS | _FFN_NORM | _MOE] * LAYERS
)

_GEMMA3 = Architecture(
    "gemma3",
    {**_HEADS, **_WINDOWED, "rope.freq_base_swa": 10000.0, "rope.freq_base": 1000000.0},
    [
        _ATTENTION
        | _QK_NORMS
        | _FFN_NORM
        | _DENSE
        | {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    ]
    * LAYERS,
)

_GPT_OSS = Architecture(
    "gpt-oss",
    {**_HEADS, **_SPARSE, **_WINDOWED},
    [
        _ATTENTION
        | _MOE
        | {
            "post_attention_norm.weight": (WIDTH,),
            "attn_sinks.weight": (HEADS,),
            "attn_q.bias": (HEADS * HEAD,),
            "attn_k.bias": (KV_HEADS * HEAD,),
            "attn_v.bias": (KV_HEADS * HEAD,),
            "attn_output.bias": (WIDTH,),
            "ffn_gate_inp.bias": (_EXPERTS,),
            "ffn_gate_exps.bias": (_EXPERTS, _EXPERT_FFN),
            "ffn_up_exps.bias": (_EXPERTS, _EXPERT_FFN),
            "ffn_down_exps.bias": (_EXPERTS, WIDTH),
        }
    ]
    * LAYERS,
)

_PHI3 = Architecture(
    "phi3",
    _HEADS,
    [
        {
            "attn_norm.weight": (WIDTH,),
            "attn_qkv.weight": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
            "attn_output.weight": (WIDTH, HEADS * HEAD),
            "ffn_norm.weight": (WIDTH,),
            "ffn_up.weight": (2 * FFN, WIDTH),
            "ffn_down.weight": (WIDTH, FFN),
        }
    ]
    * LAYERS,
)

_Q_RANK, _KV_RANK, _ROPE, _NOPE, _VALUE = 16, 16, 4, 8, 8
_LATENT_ATTENTION: Mapping[str, Shape] = {
    "attn_norm.weight": (WIDTH,),
    "attn_q_a.weight": (_Q_RANK, WIDTH),
    "attn_q_a_norm.weight": (_Q_RANK,),
    "attn_q_b.weight": (HEADS * (_NOPE + _ROPE), _Q_RANK),
    "attn_kv_a_mqa.weight": (_KV_RANK + _ROPE, WIDTH),
    "attn_kv_a_norm.weight": (_KV_RANK,),
    "attn_k_b.weight": (HEADS, _KV_RANK, _NOPE),
    "attn_v_b.weight": (HEADS, _VALUE, _KV_RANK),
    "attn_output.weight": (WIDTH, HEADS * _VALUE),
    "ffn_norm.weight": (WIDTH,),
}
_DEEPSEEK2 = Architecture(
    "deepseek2",
    {
        **_HEADS,
        **_SPARSE,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": _Q_RANK,
        "attention.kv_lora_rank": _KV_RANK,
        "attention.key_length": _KV_RANK + _ROPE,
        "attention.value_length": _KV_RANK,
        "attention.key_length_mla": _NOPE + _ROPE,
        "attention.value_length_mla": _VALUE,
        "rope.dimension_count": _ROPE,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 2,  # sigmoid
    },
    [
        _LATENT_ATTENTION | _DENSE,
        *[_LATENT_ATTENTION | _MOE | _SHARED_EXPERT | {"exp_probs_b.bias": (_EXPERTS,)}]
        * (LAYERS - 1),
    ],
)

_MAMBA2_MODEL = Architecture(
    "mamba2",
    {**_EVERY, **_SSM, "feed_forward_length": 0, "attention.head_count": 0},
    [_MAMBA2] * LAYERS,
)

_GRANITE_HYBRID = Architecture(
    "granitehybrid",
    {**_HEADS, **_SSM, "attention.head_count_kv": [0, KV_HEADS] * (LAYERS // 2)},
    [_MAMBA2 | _FFN_NORM | _DENSE, _ATTENTION | _FFN_NORM | _DENSE] * (LAYERS // 2),
)

_SHORT_KERNEL = 3
_LFM2 = Architecture(
    "lfm2",
    {
        **_HEADS,
        "attention.head_count_kv": [0, KV_HEADS] * (LAYERS // 2),
        "shortconv.l_cache": _SHORT_KERNEL,
    },
    [
        {
            "attn_norm.weight": (WIDTH,),
            "shortconv.conv.weight": (WIDTH, _SHORT_KERNEL),
            "shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
            "shortconv.out_proj.weight": (WIDTH, WIDTH),
        }
        | _FFN_NORM
        | _DENSE,
        _ATTENTION | _QK_NORMS | _FFN_NORM | _DENSE,
    ]
    * (LAYERS // 2),
    tensors={**_EMBEDDING, "token_embd_norm.weight": (WIDTH,)},
)

_KEYS, _VALUES = _STATE * _GROUPS, _STATE * _SSM_HEADS
_EXPERTS_AND_ONE_FOR_ALL = (
    _MOE
    | _SHARED_EXPERT
    | {"post_attention_norm.weight": (WIDTH,), "ffn_gate_inp_shexp.weight": (WIDTH,)}
)
_QWEN3_NEXT = Architecture(
    "qwen3next",
    {
        **_HEADS,
        **_SPARSE,
        **_SSM,
        "ssm.inner_size": _VALUES,
        "expert_shared_feed_forward_length": _EXPERT_FFN,
        "full_attention_interval": 2,
    },
    [
        _EXPERTS_AND_ONE_FOR_ALL
        | {
            "attn_norm.weight": (WIDTH,),
            "attn_qkv.weight": (2 * _KEYS + _VALUES, WIDTH),
            "attn_gate.weight": (_VALUES, WIDTH),
            "ssm_conv1d.weight": (2 * _KEYS + _VALUES, _KERNEL),
            "ssm_dt.bias": (_SSM_HEADS,),
            "ssm_a": (_SSM_HEADS,),
            "ssm_ba.weight": (2 * _SSM_HEADS, WIDTH),
            "ssm_norm.weight": (_STATE,),
            "ssm_out.weight": (WIDTH, _VALUES),
        },
        # The queries come with a gate of the same size.
        _EXPERTS_AND_ONE_FOR_ALL
        | _ATTENTION
        | _QK_NORMS
        | {"attn_q.weight": (2 * HEADS * HEAD, WIDTH)},
    ]
    * (LAYERS // 2),
)

GENERATING: Mapping[str, Architecture] = {
    one.name: one
    for one in (
        _LLAMA,
        _QWEN3,
        _QWEN3_MOE,
        _GEMMA3,
        _GPT_OSS,
        _PHI3,
        _DEEPSEEK2,
        _MAMBA2_MODEL,
        _GRANITE_HYBRID,
        _LFM2,
        _QWEN3_NEXT,
    )
}

# -- an encoder and a decoder

_BUCKETS = 8


def _t5_part(part: str) -> dict[str, Shape]:
    attention: dict[str, Shape] = {
        f"{kind}_{name}.weight": (WIDTH, WIDTH)
        for kind in ("attn", "cross_attn")[: 2 if part == "dec" else 1]
        for name in ("q", "k", "v", "o")
    }
    norms: dict[str, Shape] = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
    if part == "dec":
        norms["cross_attn_norm.weight"] = (WIDTH,)
    layer = attention | norms | _DENSE | {"attn_rel_b.weight": (_BUCKETS, HEADS)}
    return {f"{part}.blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


T5 = Architecture(
    "t5",
    {
        **_EVERY,
        "attention.head_count": HEADS,
        "attention.relative_buckets_count": _BUCKETS,
        "attention.layer_norm_epsilon": 1e-6,
    },
    [],
    tensors={
        **_EMBEDDING,
        "enc.output_norm.weight": (WIDTH,),
        "dec.output_norm.weight": (WIDTH,),
        **_t5_part("enc"),
        **_t5_part("dec"),
    },
)
