"""Write a head as a GGUF file of the architecture `eagle3`: Q8_0 matrices, F32 norms."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from examples.bundled_model.export import Array, finish, interleave
from examples.bundled_model.head.network import Eagle, Target

#: Metadata from the file of the model, so that both have the same vocabulary.
COPIED = "tokenizer."


def load_checkpoint(path: Path, model: Path) -> tuple[Eagle, Target]:
    """Read a head from a checkpoint of `train`."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    target = Target(model)
    head = Eagle(target, saved["known"])
    head.load_state_dict(saved)
    return head.eval(), target


def tensors(head: Eagle) -> Iterator[tuple[str, Array]]:
    """Yield the weights under the names that llama.cpp gives them."""

    def array(value: Tensor) -> Array:
        return value.detach().float().numpy()

    shape = head.shape
    yield "fc.weight", array(head.fc)
    yield "output_norm.weight", array(head.output_norm)
    yield "blk.0.attn_norm.weight", array(head.token_norm)
    yield "blk.0.attn_norm_2.weight", array(head.row_norm)
    yield "blk.0.ffn_norm.weight", array(head.ffn_norm)
    yield "blk.0.attn_q.weight", interleave(array(head.q), shape.heads)
    yield "blk.0.attn_k.weight", interleave(array(head.k), shape.kv_heads)
    yield "blk.0.attn_v.weight", array(head.v)
    yield "blk.0.attn_output.weight", array(head.o)
    yield "blk.0.ffn_gate.weight", array(head.gate)
    yield "blk.0.ffn_up.weight", array(head.up)
    yield "blk.0.ffn_down.weight", array(head.down)
    if len(head.known) < shape.vocab:
        yield "output.weight", array(head.output)


def write_gguf(head: Eagle, target: Target, output: Path) -> int:
    """Write the file; returns its size."""
    shape = head.shape
    writer = gguf.GGUFWriter(output, "eagle3")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.vocab)
    writer.add_array("eagle3.target_layers", list(shape.read))
    writer.add_uint32("eagle3.target_hidden_size", shape.width)
    for name, field in target.reader.fields.items():
        if name.startswith(COPIED):
            kind = field.types[0]
            part = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=part)
    if len(head.known) < shape.vocab:
        writer.add_tensor("d2t", head.known.numpy().astype(np.int64))
    finish(writer, tensors(head))
    return output.stat().st_size


def main() -> None:
    """Write a checkpoint as a GGUF file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the GGUF file of the model")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    size = write_gguf(*load_checkpoint(options.checkpoint, options.model), options.output)
    print(f"{options.output}: {size} bytes")


if __name__ == "__main__":
    main()
