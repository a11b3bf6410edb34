"""Models with recurrent layers, or with states in place of keys, that have heads for drafts.

They are here without their MTP heads; see `head_architectures`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.support import architectures as parts
from tests.support.architectures import (
    FFN,
    GENERATING,
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    WIDTH,
    WINDOW,
    Architecture,
    Shape,
    Value,
)

Layer = Mapping[str, Shape]

_EXPERTS, _EXPERT_FFN = parts._EXPERTS, parts._EXPERT_FFN
_BIAS: Layer = {"exp_probs_b.bias": (_EXPERTS,)}
_SECTIONS: Mapping[str, Value] = {"rope.dimension_sections": [2, 1, 1, 0]}

# -- Qwen 3.5: as Qwen3-Next, but beta and alpha are apart

_NEXT = GENERATING["qwen3next"]


def _qwen35(name: str, feed_forward: Layer) -> Architecture:
    dropped = (*parts._MOE, *parts._SHARED_EXPERT, "ffn_gate_inp_shexp.weight", "ssm_ba.weight")
    layers = []
    for i, layer in enumerate(_NEXT.layers):
        own = {key: shape for key, shape in layer.items() if key not in dropped} | feed_forward
        if i % 2 == 0:
            own |= {f"ssm_{one}.weight": (parts._SSM_HEADS, WIDTH) for one in ("alpha", "beta")}
        layers.append(own)
    return Architecture(name, {**_NEXT.metadata, **_SECTIONS}, layers)


QWEN35 = _qwen35("qwen35", parts._DENSE)
QWEN35_MOE = _qwen35(
    "qwen35moe",
    parts._MOE | parts._SHARED_EXPERT | {"ffn_gate_inp_shexp.weight": (WIDTH,)},
)

# -- Nemotron-H: each layer is a mixer, attention, or feed-forward; a head has the latter two

_UP_DOWN: Layer = {"ffn_up.weight": (FFN, WIDTH), "ffn_down.weight": (WIDTH, FFN)}
_NORM: Layer = {"attn_norm.weight": (WIDTH,)}
_EXPERTS_WITHOUT_GATE: Layer = {
    key: shape
    for key, shape in (parts._MOE | parts._SHARED_EXPERT | _BIAS).items()
    if key not in ("ffn_gate_exps.weight", "ffn_gate_shexp.weight")
}
_NEMOTRON: Mapping[str, Value] = {
    **parts._HEADS,
    **parts._SSM,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.head_count_kv": [0, 0, 0, KV_HEADS],
    "feed_forward_length": [0, FFN, 0, 0],
}
NEMOTRON_H = Architecture(
    "nemotron_h", _NEMOTRON, [parts._MAMBA2, _NORM | _UP_DOWN, parts._MAMBA2, parts._ATTENTION]
)
NEMOTRON_H_MOE = Architecture(
    "nemotron_h_moe",
    {
        **_NEMOTRON,
        **parts._SPARSE,
        "expert_shared_feed_forward_length": _EXPERT_FFN,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
    },
    [parts._MAMBA2, _NORM | _EXPERTS_WITHOUT_GATE, parts._MAMBA2, parts._ATTENTION],
)
NEMOTRON_HEAD: Layer = {
    **parts._ATTENTION,
    **_EXPERTS_WITHOUT_GATE,
    "post_attention_norm.weight": (WIDTH,),
    "nextn.shared_head_norm.weight": (WIDTH,),
}

# -- Ling 3: layers of delta attention, and latent attention with a gate for each head

_INNER = HEADS * HEAD
_DELTA: Layer = {
    **_NORM,
    **{f"ssm_conv1d_{part}.weight": (1, _INNER, 1, parts._KERNEL) for part in "qkv"},
    **{f"attn_{part}.weight": (_INNER, WIDTH) for part in "qkv"},
    "ssm_f_a.weight": (_INNER, WIDTH),
    "ssm_g_a.weight": (_INNER, WIDTH),
    "ssm_beta.weight": (HEADS, WIDTH),
    "ssm_a": (HEADS, 1),
    "ssm_dt.bias": (_INNER,),
    "ssm_norm.weight": (HEAD,),
    "attn_output.weight": (WIDTH, _INNER),
    "ffn_norm.weight": (WIDTH,),
}
_LATENT: Layer = parts._LATENT_ATTENTION | {"attn_gate.weight": (HEADS, WIDTH)}
_LING_MOE: Layer = parts._MOE | parts._SHARED_EXPERT | _BIAS
BAILING_MOE3 = Architecture(
    "bailingmoe3",
    {
        **GENERATING["deepseek2"].metadata,
        "attention.head_count_kv": [0, 1, 0, 1],
        "ssm.conv_kernel": parts._KERNEL,
        "kda.head_dim": HEAD,
        "kda.gate_lower_bound": -5.0,
    },
    [_DELTA | parts._DENSE, *[_LATENT | _LING_MOE, _DELTA | _LING_MOE, _LATENT | _LING_MOE]],
)
BAILING_HEAD: Layer = _LATENT | _LING_MOE | {"layer_output_norm.weight": (WIDTH,)}

# -- DeepSeek V4: several residual streams, and keys of a window with states of what is before it

_STREAMS, _GROUPS, _RANK, _INDEX = 4, 2, 8, 64
_MIX = (2 + _STREAMS) * _STREAMS
_V4_HEAD, _V4_ROPE = 16, 4
_V4_LAYER: Layer = {
    **_NORM,
    "attn_sinks.weight": (HEADS,),
    "attn_q_a.weight": (parts._Q_RANK, WIDTH),
    "attn_q_a_norm.weight": (parts._Q_RANK,),
    "attn_q_b.weight": (HEADS * _V4_HEAD, parts._Q_RANK),
    "attn_kv.weight": (_V4_HEAD, WIDTH),
    "attn_kv_a_norm.weight": (_V4_HEAD,),
    "attn_output_a.weight": (_RANK * _GROUPS, HEADS * _V4_HEAD // _GROUPS),
    "attn_output_b.weight": (WIDTH, _GROUPS * _RANK),
    **{
        f"hc_{part}_{name}.weight": shape
        for part in ("attn", "ffn")
        for name, shape in (
            ("fn", (_MIX, _STREAMS * WIDTH)),
            ("base", (_MIX,)),
            ("scale", (3,)),
        )
    },
    "ffn_norm.weight": (WIDTH,),
    **_LING_MOE,
}
_FOUR: Layer = {
    "attn_compressor_kv.weight": (2 * _V4_HEAD, WIDTH),
    "attn_compressor_gate.weight": (2 * _V4_HEAD, WIDTH),
    "attn_compressor_ape.weight": (4, 2 * _V4_HEAD),
    "attn_compressor_norm.weight": (_V4_HEAD,),
    "indexer.proj.weight": (2, WIDTH),
    "indexer.attn_q_b.weight": (2 * _INDEX, parts._Q_RANK),
    "indexer_compressor_kv.weight": (2 * _INDEX, WIDTH),
    "indexer_compressor_gate.weight": (2 * _INDEX, WIDTH),
    "indexer_compressor_ape.weight": (4, 2 * _INDEX),
    "indexer_compressor_norm.weight": (_INDEX,),
}
DEEPSEEK4 = Architecture(
    "deepseek4",
    {
        **parts._HEADS,
        **parts._SPARSE,
        "attention.head_count_kv": 1,
        "attention.key_length": _V4_HEAD,
        "attention.value_length": _V4_HEAD,
        "rope.dimension_count": _V4_ROPE,
        "attention.q_lora_rank": parts._Q_RANK,
        "attention.sliding_window": WINDOW,
        "attention.indexer.head_count": 2,
        "attention.indexer.key_length": _INDEX,
        "attention.indexer.top_k": 64,
        "attention.output_group_count": _GROUPS,
        "attention.output_lora_rank": _RANK,
        "attention.compress_rope_freq_base": 10000.0,
        "attention.compress_ratios": [4, 0, 4, 0],
        "hyper_connection.count": _STREAMS,
        "hyper_connection.sinkhorn_iterations": 4,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 4,  # the root of softplus
        "swiglu_clamp_exp": [0.0] * LAYERS,
    },
    [_V4_LAYER | _FOUR, _V4_LAYER] * (LAYERS // 2),
    tensors={
        **GENERATING["llama"].tensors,
        "output_hc_fn.weight": (_STREAMS, _STREAMS * WIDTH),
        "output_hc_base.weight": (_STREAMS,),
        "output_hc_scale.weight": (1,),
    },
)
DEEPSEEK4_HEAD: Layer = _V4_LAYER

#: By architecture.
HYBRID: Mapping[str, Architecture] = {
    one.name: one
    for one in (QWEN35, QWEN35_MOE, NEMOTRON_H, NEMOTRON_H_MOE, BAILING_MOE3, DEEPSEEK4)
}

#: A model that guesses blocks for it, of the same kind of layers; see `head_architectures.DSPARK`.
_MARKOV = 8
DEEPSEEK4_DSPARK = Architecture(
    "dflash",
    {
        **{
            key: value
            for key, value in DEEPSEEK4.metadata.items()
            if "indexer" not in key and key not in ("hash_layer_count",)
        },
        "block_count": 2,
        "attention.compress_ratios": [0, 0],
        "swiglu_clamp_exp": [0.0, 0.0],
        "target_layers": (1, 2),
        "block_size": 8,
    },
    [_V4_LAYER] * 2,
    tensors={
        "fc.weight": (WIDTH, 2 * WIDTH),
        "enc.output_norm.weight": (WIDTH,),
        "output_norm.weight": (WIDTH,),
        "output_hc_fn.weight": (_STREAMS, _STREAMS * WIDTH),
        "output_hc_base.weight": (_STREAMS,),
        "output_hc_scale.weight": (1,),
        "markov_w1.weight": (parts.VOCAB, _MARKOV),
        "markov_w2.weight": (parts.VOCAB, _MARKOV),
        "conf_proj.weight": (1, WIDTH + _MARKOV),
    },
)
