"""Writes tiny GGUF files with random weights, one for each architecture of a table.

The same architecture and seed make the same file, of some hundred kilobytes. The text of such a
model means nothing, but hangs on all of the context: attention is peaked, recurrent states fade
slowly, and the logits are far enough apart that rounding does not change the best token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np

from benchmarks.gguf_maker import CHATML, CONTROL
from tests.support.architectures import GENERATING, T5, Architecture, Shape, Value
from tests.support.gguf_models import Array, finish, write_byte_pairs

#: The deviation of the logits: about three times that of a trained model.
SPREAD = 10.0
#: The factor of the queries' size over one that keeps the size of their input.
PEAK = 3.0


def write(
    path: Path,
    architecture: Architecture,
    *,
    seed: int = 0,
    more_tokens: Sequence[str] = (),
    mask: int | None = None,
    change: Callable[[dict[str, Array]], None] = lambda _weights: None,
) -> Path:
    """Write a model of this architecture, with further tokens and a mask token; returns the path.

    `change` may change the weights before.
    """
    writer = gguf.GGUFWriter(str(path), architecture.name)
    writer.add_name("random")  # llama.cpp treats vocabularies by some names of models
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for key, value in architecture.metadata.items():
        _add(writer, f"{architecture.name}.{key}", value)
    write_byte_pairs(writer, more_tokens)
    writer.add_chat_template(CHATML)
    if mask is not None:
        writer.add_mask_token_id(mask)
    weights = _weights(architecture, seed)
    change(weights)
    finish(writer, weights)
    return path


def write_generating(folder: Path, name: str, *, seed: int = 0) -> Path:
    """Write a model that generates text, named as its architecture; returns the path."""
    return write(folder / f"{name}.gguf", GENERATING[name], seed=seed)


def write_t5(folder: Path) -> Path:
    """Write a model with an encoder and a decoder; returns the path."""
    return write(folder / "t5.gguf", T5)


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, list(value))


def _weights(architecture: Architecture, seed: int) -> dict[str, Array]:
    shapes = dict(architecture.tensors)
    for i, layer in enumerate(architecture.layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {name: _tensor(name, shape, seed) for name, shape in shapes.items()}


def _tensor(name: str, shape: Shape, seed: int) -> Array:
    """Make one tensor. Its numbers hang on its name, so that others may come and go."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    short = name.rpartition("blk.")[2].partition(".")[2] if "blk." in name else name
    noise = rng.normal(0, 1, shape)
    if short in ("output_norm.weight", "token_embd_norm.weight"):  # the last: lfm2's output
        values = SPREAD * (1 + 0.1 * noise)
    elif short in ("attn_q_norm.weight", "attn_q_a_norm.weight"):
        values = PEAK * (1 + 0.1 * noise)
    elif short.endswith(("norm.weight", "scale.weight")) or short in ("ssm_d", "rope_freqs.weight"):
        values = 1 + 0.1 * noise
    elif short == "ssm_a":  # how fast a state fades
        values = -rng.uniform(0.002, 0.05, shape)
    elif short.endswith(".bias"):
        values = 0.1 * noise
    else:
        values = noise * shape[-1] ** -0.5
        if short in ("attn_q.weight", "attn_qkv.weight"):
            values *= PEAK
    if name == "output.weight":
        values[:0x21] = values[0x7F:0x100] = 0.0  # no bytes that are no text by themselves
        values[-len(CONTROL) :] = 0.0
    return np.asarray(values, dtype=np.float32)
