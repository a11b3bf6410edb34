"""Models of families whose tensors llama.cpp is asked for: only the metadata is written here.

A file without tensors is refused with the name of the first that is missing, and one with a wrong
shape with the right one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import gguf
import numpy as np

from tests.support import tiny_models
from tests.support.architectures import VOCAB, Architecture, Shape, Value
from tests.support.gguf_models import write_byte_pairs
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama.model import LlamaModel

_MISSING = re.compile(r"tensor '(.+?)'(?: not found|\.?$)")
_SHAPE = re.compile(r"tensor '(.+?)' has wrong shape; expected +([\d, ]+), got")


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes of a model. Every second layer is recurrent."""

    width: int = 64
    layers: int = 4
    ffn: int = 96
    heads: int = 4
    head: int = 16
    state: int = 16
    experts: int = 4


def metadata(name: str, sizes: Sizes) -> dict[str, Value]:
    """Return the metadata of a family: the same for all, as far as it goes."""
    n = sizes.layers
    is_recurrent = [i % 2 == 0 for i in range(n)]
    kv_heads = [0 if one else sizes.heads // 2 for one in is_recurrent]
    made: dict[str, Value] = {
        "context_length": 4096,
        "embedding_length": sizes.width,
        "block_count": n,
        "feed_forward_length": sizes.ffn,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": sizes.head,
        "attention.value_length": sizes.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": sizes.head // 2,
        "rope.dimension_sections": [2, 1, 1, 0],
        "rope.freq_base": 10000.0,
        "full_attention_interval": 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": sizes.heads * sizes.state,
        "ssm.state_size": sizes.state,
        "ssm.time_step_rank": sizes.heads,
        "ssm.group_count": sizes.heads // 2,
        "shortconv.l_cache": 3,
        "kda.head_dim": sizes.state,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -1.0,
    }
    if name in _LINEAR:
        made["attention.head_count_kv"] = sizes.heads // 2
    if name in _LATENT:
        latent, rope = 2 * sizes.head, 0 if name == "glm5-next" else sizes.head // 2
        made |= {
            "attention.head_count": sizes.heads,
            "attention.head_count_kv": [0 if one else 1 for one in is_recurrent],
            "attention.q_lora_rank": latent,
            "attention.kv_lora_rank": latent,
            "attention.key_length": latent + rope,
            "attention.value_length": latent,
            "attention.key_length_mla": sizes.head + rope,
            "attention.value_length_mla": sizes.head,
            "rope.dimension_count": rope,
        }
    if name in _SPARSE:
        made |= {
            "expert_count": sizes.experts,
            "expert_used_count": 2,
            "expert_feed_forward_length": sizes.ffn // 2,
            "expert_shared_feed_forward_length": sizes.ffn // 2,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
            "leading_dense_block_count": 1,
        }
    return made | _OWN.get(name, lambda _sizes: {})(sizes)


_LATENT = {"bailingmoe3", "kimi-k3", "glm5-next", "kimi-linear"}
_LINEAR = {"qwen35", "qwen35moe"}
_STATES_FIRST = ("nemotron_h", "nemotron_h_moe")
_SPARSE = {*_LATENT, "qwen35moe", "lfm2moe", "nemotron_h_moe", "deepseek4"}


def _layers_of(sizes: Sizes) -> dict[str, Value]:
    # A state, a feed-forward layer, attention, and the same again.
    kinds = [i % 3 for i in range(sizes.layers)]
    return {
        "feed_forward_length": [sizes.ffn if kind == 1 else 0 for kind in kinds],
        "attention.head_count_kv": [sizes.heads // 2 if kind == 2 else 0 for kind in kinds],
        "attention.head_count": sizes.heads,
    }


_HYPER: dict[str, Value] = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 4096,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
}
_OWN = {
    **dict.fromkeys(_STATES_FIRST, _layers_of),
    "kimi-k3": lambda _sizes: {
        "attn_res.block_size": 2,
        "activation.situ_beta": 1.0,
        "activation.situ_linear_beta": 1.0,
    },
    "glm5-next": lambda _sizes: dict(_HYPER),
    "deepseek4": lambda sizes: {
        **_HYPER,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 32,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.indexer.key_length": 64,
        "rope.dimension_count": 32,
        "attention.sliding_window": 32,
        "attention.output_group_count": sizes.heads,
        "attention.output_lora_rank": 16,
        "attention.compress_ratios": [0, 0, 4, 128][: sizes.layers],
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_gating_func": 4,
    },
}
#: Those whose states go back.
FAMILIES = (
    "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe", "bailingmoe3",
    "kimi-k3", "glm5-next", "deepseek4",
)  # fmt: skip


def _try(path: Path, name: str, known: Mapping[str, Value], shapes: Mapping[str, Shape]) -> str:
    """Load a file with tensors of these shapes; returns why that fails, or nothing."""
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_name("random")
    for key, value in known.items():
        tiny_models._add(writer, f"{name}.{key}", value)
    write_byte_pairs(writer, ())
    for key, shape in shapes.items():
        writer.add_tensor_info(key, shape, np.dtype(np.float32), 4 * math.prod(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    padding = writer.data_alignment
    n_bytes = sum(4 * math.prod(shape) + padding for shape in shapes.values()) + padding
    os.truncate(path, path.stat().st_size + n_bytes)  # a hole for the data
    try:
        LlamaModel.load(Config(model=str(path)), weights=False).close()
    except ModelLoadError as error:
        return error.message
    return ""


def _of_layer(name: str) -> str:
    return name.split(".", 2)[-1] if name.startswith("blk.") else name


@cache
def architecture(name: str, sizes: Sizes = Sizes()) -> Architecture:
    """Find the tensors of a family."""
    known, shapes = metadata(name, sizes), {"output.weight": (VOCAB, sizes.width)}
    if name in _LINEAR:  # it may have other tensors in the place of these
        keys, values = sizes.heads // 2 * sizes.state, sizes.heads * sizes.state
        for i in range(0, sizes.layers, 2):
            shapes[f"blk.{i}.attn_qkv.weight"] = (2 * keys + values, sizes.width)
            shapes[f"blk.{i}.attn_gate.weight"] = (values, sizes.width)
    if name in _STATES_FIRST:
        for i in range(0, sizes.layers, 3):
            wide = sizes.heads * sizes.state + 2 * (sizes.heads // 2) * sizes.state
            shapes[f"blk.{i}.ssm_conv1d.bias"] = (wide,)
    with TemporaryDirectory() as folder:
        while why := _try(Path(folder) / "asked.gguf", name, known, shapes):
            if missing := _MISSING.search(why):
                alike = (one for one in shapes if _of_layer(one) == _of_layer(missing[1]))
                shapes[missing[1]] = shapes.get(next(alike, ""), (1,))
            elif wrong := _SHAPE.search(why):
                dims = [int(dim) for dim in wrong[2].split(",")]
                while len(dims) > 1 and dims[-1] == 1:
                    dims.pop()
                shapes[wrong[1]] = tuple(reversed(dims))
            else:
                raise AssertionError(why)
    return Architecture(name, known, [], shapes)


def write(folder: Path, name: str, sizes: Sizes = Sizes()) -> Path:
    """Write a model of a family, named as it; returns the path."""
    return tiny_models.write(folder / f"{name}.gguf", architecture(name, sizes))
