"""Write a checkpoint as a GGUF file: Q8_0 matrices, F32 norms."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from examples.bundled_model.chat import template_source
from examples.bundled_model.model import Config, Llama
from examples.bundled_model.tokenizer import (
    CONTROL,
    END_OF_TEXT,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    IM_END,
    PRE,
    USER_DEFINED,
    load_tokenizer,
    merges,
    vocabulary,
)

SIZE_LIMIT = 4_000_000
NAME = "trioserve bundled"
DESCRIPTION = (
    "A very small chat model for trying and testing trioserve. "
    "It talks, counts, copies, writes JSON and calls tools; it knows next to nothing."
)

Array = npt.NDArray[np.float32]


def interleave(weight: Array, heads: int) -> Array:
    """Reorder the rows of each head from two halves to llama.cpp's pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def tensors(model: Llama) -> Iterator[tuple[str, Array]]:
    """Yield the weights under the names that llama.cpp gives them."""
    config = model.config

    def array(value: torch.Tensor) -> Array:
        return value.detach().float().cpu().numpy().astype(np.float32)

    yield "token_embd.weight", array(model.embedding)
    yield "output_norm.weight", array(model.norm)
    for index, block in enumerate(model.blocks):
        weights = {name: array(value) for name, value in block.named_parameters()}
        prefix = f"blk.{index}."
        yield prefix + "attn_norm.weight", weights["attn_norm"]
        yield prefix + "attn_q.weight", interleave(weights["q"], config.heads)
        yield prefix + "attn_k.weight", interleave(weights["k"], config.kv_heads)
        yield prefix + "attn_v.weight", weights["v"]
        yield prefix + "attn_output.weight", weights["o"]
        yield prefix + "ffn_norm.weight", weights["ffn_norm"]
        yield prefix + "ffn_gate.weight", weights["gate"]
        yield prefix + "ffn_up.weight", weights["up"]
        yield prefix + "ffn_down.weight", weights["down"]


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    tokens = vocabulary(tokenizer)
    kinds = [int(gguf.TokenType.NORMAL)] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    for token in CONTROL:
        kinds[ids[token]] = int(gguf.TokenType.CONTROL)
    for token in USER_DEFINED:
        kinds[ids[token]] = int(gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges(tokenizer))
    writer.add_bos_token_id(ids[END_OF_TEXT])
    writer.add_eos_token_id(ids[IM_END])
    writer.add_eot_token_id(ids[IM_END])
    writer.add_pad_token_id(ids[END_OF_TEXT])
    writer.add_uint32("tokenizer.ggml.fim_pre_token_id", ids[FIM_PREFIX])
    writer.add_uint32("tokenizer.ggml.fim_suf_token_id", ids[FIM_SUFFIX])
    writer.add_uint32("tokenizer.ggml.fim_mid_token_id", ids[FIM_MIDDLE])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(template_source())


def finish(writer: gguf.GGUFWriter, named: Iterable[tuple[str, Array]]) -> None:
    """Add tensors, the matrices in Q8_0, and write the file."""
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, value in named:
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(model: Llama, tokenizer: Tokenizer, output: Path) -> int:
    """Write the file beside its place, then move it there. Return its size."""
    config = model.config
    part = output.with_name(output.name + ".part")
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.epsilon)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(config.vocab)
    _add_tokenizer(writer, tokenizer)
    finish(writer, tensors(model))
    size = part.stat().st_size
    if size > SIZE_LIMIT:
        part.unlink()
        raise SystemExit(f"{size} bytes is over the limit of {SIZE_LIMIT}")
    os.replace(part, output)
    return size


def load_checkpoint(path: Path) -> Llama:
    """Read a model from a checkpoint of ``train.py``."""
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model = Llama(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model.eval()


def main() -> None:
    """Write a checkpoint as a GGUF file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--checkpoint", type=Path, help="without one: random weights")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.checkpoint is None:
        torch.manual_seed(0)
        model = Llama(Config())
    else:
        model = load_checkpoint(options.checkpoint)
    size = write_gguf(model, load_tokenizer(options.tokenizer), options.output)
    print(f"{options.output}: {size} bytes")


if __name__ == "__main__":
    main()
