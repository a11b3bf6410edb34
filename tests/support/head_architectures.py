"""Models with heads for drafts, in their file or in a separate one; see `architectures`."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from tests.support import architectures as parts, hybrid_architectures as hybrids
from tests.support.architectures import (
    FFN,
    GENERATING,
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    WINDOW,
    Architecture,
    Shape,
    Value,
)

Layer = Mapping[str, Shape]

_ATTENTION, _QK_NORMS, _FFN_NORM = parts._ATTENTION, parts._QK_NORMS, parts._FFN_NORM
_DENSE, _MOE, _SHARED_EXPERT = parts._DENSE, parts._MOE, parts._SHARED_EXPERT
_BIAS: Layer = {"exp_probs_b.bias": (parts._EXPERTS,)}
_SPARSE: Mapping[str, Value] = {
    **parts._HEADS,
    **parts._SPARSE,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_gating_func": 2,  # sigmoid
}

# -- models that have MTP heads, without them

_GLM_LAYER = _ATTENTION | {"post_attention_norm.weight": (WIDTH,)}
_GLM4_MOE = Architecture(
    "glm4moe",
    _SPARSE,
    [_GLM_LAYER | _DENSE, *[_GLM_LAYER | _MOE | _SHARED_EXPERT | _BIAS] * (LAYERS - 1)],
)

_HY_LAYER = _ATTENTION | _QK_NORMS | _FFN_NORM
_HY_V3 = Architecture(
    "hy_v3", _SPARSE, [_HY_LAYER | _DENSE, *[_HY_LAYER | _MOE | _SHARED_EXPERT] * (LAYERS - 1)]
)

#: Attention and what follows it are computed from the same numbers.
_COHERE2_MOE = Architecture(
    "cohere2moe",
    {**_SPARSE, "attention.sliding_window": WINDOW, "logit_scale": 1.0},
    [_ATTENTION | _DENSE, *[_ATTENTION | _MOE | _SHARED_EXPERT] * (LAYERS - 1)],
)

#: A sparse attention: an indexer with separate keys selects the tokens that it reads.
_INDEX_HEADS, _INDEX_KEY = 2, 64
_INDEXED: Mapping[str, Value] = {
    "attention.indexer.head_count": _INDEX_HEADS,
    "attention.indexer.key_length": _INDEX_KEY,
    "attention.indexer.top_k": 64,
}
_INDEXER: Layer = {
    "indexer.k_norm.weight": (_INDEX_KEY,),
    "indexer.k_norm.bias": (_INDEX_KEY,),
    "indexer.proj.weight": (_INDEX_HEADS, WIDTH),
    "indexer.attn_k.weight": (_INDEX_KEY, WIDTH),
    "indexer.attn_q_b.weight": (_INDEX_HEADS * _INDEX_KEY, parts._Q_RANK),
}
_DEEPSEEK2 = GENERATING["deepseek2"]


def _indexed(name: str) -> Architecture:
    metadata = {**_DEEPSEEK2.metadata, **_INDEXED}
    return Architecture(name, metadata, [layer | _INDEXER for layer in _DEEPSEEK2.layers])


def _windows(n_layers: int) -> Mapping[str, Value]:
    """Sliding windows in every second of `n_layers` layers, and in the heads."""
    pattern = [i % 2 == 0 or i >= LAYERS for i in range(n_layers)]
    return {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": pattern}


_STEP_LAYER = _ATTENTION | _QK_NORMS | _FFN_NORM | {"attn_gate.weight": (HEADS, WIDTH)}
_STEP35 = Architecture(
    "step35",
    {**_SPARSE, "expert_shared_feed_forward_length": parts._EXPERT_FFN},
    [_STEP_LAYER | _DENSE, *[_STEP_LAYER | _MOE | _SHARED_EXPERT | _BIAS] * (LAYERS - 1)],
)

_MIMO_LAYER = _ATTENTION | _FFN_NORM | _MOE | _BIAS
_MIMO2 = Architecture("mimo2", {**_SPARSE, "attention.value_scale": 0.9}, [_MIMO_LAYER] * LAYERS)
_MIMO_HEAD: Layer = {
    "attn_norm.weight": (WIDTH,),
    "attn_qkv.weight": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
    **_FFN_NORM,
    **_DENSE,
}

# -- their heads

_NEXTN: Layer = {
    "nextn.eh_proj.weight": (WIDTH, 2 * WIDTH),
    "nextn.enorm.weight": (WIDTH,),
    "nextn.hnorm.weight": (WIDTH,),
}


#: Metadata that may be lists with a number for each layer.
_OF_EACH_LAYER = frozenset({
    "attention.compress_ratios", "attention.head_count_kv", "feed_forward_length",
    "swiglu_clamp_exp",
})  # fmt: skip


def with_heads(one: Architecture, n_heads: int = 1, layer: Layer | None = None) -> Architecture:
    """Add MTP heads behind the layers of a model, each like the last layer, or like this one."""
    metadata = {
        **one.metadata,
        "block_count": LAYERS + n_heads,
        "nextn_predict_layers": n_heads,
    }
    for key in _OF_EACH_LAYER & metadata.keys():
        if not isinstance(of_each := metadata[key], int | float | str):
            metadata[key] = [*of_each, *[of_each[-1]] * n_heads]
    if one.name in ("step35", "mimo2"):
        metadata |= _windows(LAYERS + n_heads)
    layers = [*one.layers, *[(layer or one.layers[-1]) | _NEXTN] * n_heads]
    return attrs.evolve(one, metadata=metadata, layers=layers)


#: By architecture. llama.cpp has the heads of exaone-moe in its files, but does not compute them.
MTP: Mapping[str, Architecture] = {
    one.name: one
    for one in (
        with_heads(_GLM4_MOE),
        with_heads(_DEEPSEEK2),
        with_heads(_COHERE2_MOE),
        with_heads(_indexed("deepseek32")),
        with_heads(_indexed("glm-dsa")),
        with_heads(_HY_V3),
        with_heads(_STEP35, 4),
        with_heads(_MIMO2, 3, _MIMO_HEAD),
        with_heads(GENERATING["qwen3next"]),
        with_heads(hybrids.QWEN35),
        with_heads(hybrids.QWEN35_MOE),
        with_heads(hybrids.NEMOTRON_H_MOE, layer=hybrids.NEMOTRON_HEAD),
        with_heads(hybrids.BAILING_MOE3, layer=hybrids.BAILING_HEAD),
        with_heads(hybrids.DEEPSEEK4, layer=hybrids.DEEPSEEK4_HEAD),
    )
}
TWO_HEADS = with_heads(_GLM4_MOE, 2)


def heads_of(one: Architecture) -> Architecture:
    """Give what is in a separate file with the MTP heads of a model: no layers but these."""
    return attrs.evolve(one, layers=[{}] * LAYERS + list(one.layers[LAYERS:]))


def without_heads(one: Architecture) -> Architecture:
    """Give a model whose MTP heads are in a separate file, which its own file may say."""
    if one.name in hybrids.HYBRID:
        return hybrids.HYBRID[one.name]
    return attrs.evolve(one, layers=[*one.layers[:LAYERS], *[{}] * (len(one.layers) - LAYERS)])


# -- a model, and an assistant that reads its KV cache

_GEMMA_METADATA: Mapping[str, Value] = {
    **parts._HEADS,
    "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD,
    "attention.shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
}
_GEMMA_NORMS: Layer = {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
_ROPE_FREQS: Layer = {"rope_freqs.weight": (HEAD // 2,)}
GEMMA4 = Architecture(
    "gemma4",
    {**_GEMMA_METADATA, **_windows(LAYERS)},
    [_ATTENTION | _QK_NORMS | _FFN_NORM | _DENSE | _GEMMA_NORMS] * LAYERS,
    tensors={**GENERATING["llama"].tensors, **_ROPE_FREQS},
)
_OWN = 2 * WIDTH
ASSISTANT = Architecture(
    "gemma4-assistant",
    {
        **_GEMMA_METADATA,
        "embedding_length": _OWN,
        "embedding_length_out": WIDTH,
        "block_count": 2,
        "nextn_predict_layers": 2,
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": [True, False],
    },
    [
        {
            "attn_norm.weight": (_OWN,),
            "attn_q.weight": (HEADS * HEAD, _OWN),
            "attn_output.weight": (_OWN, HEADS * HEAD),
            "attn_q_norm.weight": (HEAD,),
            "post_attention_norm.weight": (_OWN,),
            "layer_output_scale.weight": (1,),
            "ffn_norm.weight": (_OWN,),
            "ffn_gate.weight": (FFN, _OWN),
            "ffn_up.weight": (FFN, _OWN),
            "ffn_down.weight": (_OWN, FFN),
            "post_ffw_norm.weight": (_OWN,),
        }
    ]
    * 2,
    tensors={
        "token_embd.weight": (VOCAB, _OWN),
        "output_norm.weight": (_OWN,),
        **_ROPE_FREQS,
        "nextn.pre_projection.weight": (_OWN, 2 * WIDTH),
        "nextn.post_projection.weight": (WIDTH, _OWN),
    },
)

# -- models that heads read

#: The layers of a model that heads read.
READ_LAYERS = (1, 2, 3)

_GLIMMER = Architecture(
    "muse-glimmer",
    {**parts._HEADS, **parts._WINDOWED, "logit_scale": 1.0},
    [
        _ATTENTION
        | _QK_NORMS
        | _FFN_NORM
        | _DENSE
        | _GEMMA_NORMS
        | {"attn_gate.weight": (HEADS * HEAD, WIDTH)}
    ]
    * LAYERS,
)
_MINIMAX_M2 = Architecture(
    "minimax-m2",
    {**parts._HEADS, **parts._SPARSE, "feed_forward_length": parts._EXPERT_FFN,
     "expert_gating_func": 2},
    [
        _ATTENTION
        | _FFN_NORM
        | _MOE
        | _BIAS
        | {"attn_q_norm.weight": (HEADS * HEAD,), "attn_k_norm.weight": (KV_HEADS * HEAD,)}
    ]
    * LAYERS,
)  # fmt: skip
#: By architecture.
READ: Mapping[str, Architecture] = {
    one.name: one
    for one in (
        *(GENERATING[name] for name in ("llama", "qwen3", "qwen3moe", "gpt-oss")),
        attrs.evolve(GENERATING["llama"], name="nanbeige"),
        attrs.evolve(GENERATING["qwen3"], name="hunyuan_vl"),
        GEMMA4,
        _GLIMMER,
        _MINIMAX_M2,
        without_heads(MTP["mimo2"]),
        *hybrids.HYBRID.values(),
        *(GENERATING[name] for name in ("lfm2", "qwen3next")),
    )
}

# -- the heads that read them

_WIDE_HEADS: Mapping[str, Value] = {**parts._HEADS, "attention.head_count_kv": HEADS}
_WIDE: Layer = {
    **_ATTENTION,
    "attn_k.weight": (HEADS * HEAD, WIDTH),
    "attn_v.weight": (HEADS * HEAD, WIDTH),
}

#: Its attention reads a token and a row. Embedding and output are the model's.
EAGLE3 = Architecture(
    "eagle3",
    {
        **_WIDE_HEADS,
        "block_count": 1,
        "target_layers": READ_LAYERS,
        "target_hidden_size": WIDTH,
    },
    [
        _WIDE
        | _FFN_NORM
        | _DENSE
        | {"attn_norm_2.weight": (WIDTH,)}
        | {f"attn_{part}.weight": (HEADS * HEAD, 2 * WIDTH) for part in "qkv"}
    ],
    tensors={"fc.weight": (WIDTH, len(READ_LAYERS) * WIDTH), "output_norm.weight": (WIDTH,)},
)

BLOCK = 8
DFLASH = Architecture(
    "dflash",
    {**_WIDE_HEADS, "block_count": 2, "target_layers": READ_LAYERS[:2], "block_size": BLOCK},
    [_WIDE | _QK_NORMS | _FFN_NORM | _DENSE] * 2,
    tensors={
        "fc.weight": (WIDTH, 2 * WIDTH),
        "enc.output_norm.weight": (WIDTH,),
        "output_norm.weight": (WIDTH,),
    },
)

_RANK = 8
#: Its guesses are corrected by the token before each, and it says how sure it is of them.
DSPARK = attrs.evolve(
    DFLASH,
    tensors={
        **DFLASH.tensors,
        "markov_w1.weight": (VOCAB, _RANK),
        "markov_w2.weight": (VOCAB, _RANK),
        "conf_proj.weight": (1, WIDTH + _RANK),
    },
)
_CANDIDATES, _KERNEL, _GROUP = 4, 2, 8
_DYNAMIC = 2 * _KERNEL * (WIDTH // _GROUP)
#: It gives several candidates for each place, and scores of their pairs.
DFLASH2 = attrs.evolve(
    DFLASH,
    metadata={
        **DFLASH.metadata,
        "conv_kernel_size": _KERNEL,
        "conv_group_size": _GROUP,
        "selector_rank": _RANK,
        "selector_top_k": _CANDIDATES,
    },
    layers=[
        layer
        | {
            "attn_conv_base": (2, _KERNEL, WIDTH),
            "attn_conv_proj.weight": (_DYNAMIC, WIDTH),
            "ffn_conv_base": (2, _KERNEL, WIDTH),
            "ffn_conv_proj.weight": (_DYNAMIC, WIDTH),
        }
        for layer in DFLASH.layers
    ],
    tensors={
        **DFLASH.tensors,
        "selector_predecessor.weight": (VOCAB, _RANK),
        "selector_successor.weight": (VOCAB, _RANK),
        "selector_hidden.weight": (_RANK, WIDTH),
    },
)
