"""Write the voice as two files: the speaker, and a projector with the flow and the decoder.

libmtmd wants an encoder for recordings of a voice beside them. Ours is as small as can be and
its rows are zeros: the voice is always the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.voice.codec import (
    EPSILON,
    RATIOS,
    STEPS,
    CausalLayer,
    CodecConfig,
    Decoder,
)
from examples.bundled_model.voice.lexicon import BEGIN, SPACE, Tokens
from examples.bundled_model.voice.speaker import SCALE, Speaker, SpeakerConfig

NAME = "trioserve bundled voice"
SIZE_LIMIT = 2_000_000
#: libmtmd's threshold for the score of the end.
END = -4.0
#: Rows: those of the longest recording of a voice, and of a text that is not cut into pieces.
CONTEXT = 1024
#: Sizes of the encoder that does nothing.
IDLE = 32
SPECIAL = ("<pad>", "</s>", "<unk>")
MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "up": "ffn_up", "down": "ffn_down"}

Array = npt.NDArray[np.float32]
Named = Iterator[tuple[str, Tensor]]


class File:
    """A GGUF file in the making: Q8_0 matrices, F16 kernels, the rest in F32."""

    def __init__(self, output: Path, kind: str) -> None:
        self.output, self.part = output, output.with_name(output.name + ".part")
        self.writer = gguf.GGUFWriter(self.part, kind)
        self.writer.add_name(NAME)
        self.writer.add_description("Speaks English words on one note; learned from espeak-ng.")
        self.writer.add_license("MIT")
        self.writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        self.writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def add(self, name: str, value: Tensor) -> None:
        """Add weights; a matrix whose rows are no multiple of 32 is a vector in disguise."""
        array: Array = value.detach().float().numpy()
        if array.ndim == 3:
            self.writer.add_tensor(name, array.astype(np.float16))
        elif array.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            self.writer.add_tensor(name, gguf.quants.quantize(array, q8), raw_dtype=q8)
        else:
            self.writer.add_tensor(name, array)

    def close(self) -> int:
        """Write the file, move it to its place, and return its size."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        size = self.part.stat().st_size
        os.replace(self.part, self.output)
        return size


def layer(prefix: str, weights: CausalLayer, names: dict[str, str]) -> Named:
    """Yield a layer under llama.cpp's names."""
    for ours, theirs in names.items():
        value = weights.get_parameter(ours)
        yield f"{prefix}.{theirs}" + ("" if "." in theirs else ".weight"), value


BACKBONE = {
    "ln1.weight": "attn_norm.weight", "ln1.bias": "attn_norm.bias",
    "ln2.weight": "ffn_norm.weight", "ln2.bias": "ffn_norm.bias",
    "out": "attn_output", **MATRICES,
}  # fmt: skip
CLIP = {
    **{f"{ln}.{kind}": f"{ln}.{kind}" for ln in ("ln1", "ln2") for kind in ("weight", "bias")},
    "out": "attn_out", **MATRICES,
}  # fmt: skip


def clip_layer(prefix: str, weights: CausalLayer) -> Named:
    """Yield a layer of libmtmd, whose outputs are scaled."""
    yield from layer(prefix, weights, CLIP)
    for scale in ("ls1", "ls2"):
        yield f"{prefix}.{scale}.weight", torch.ones(weights.out.shape[0])


def vocabulary(file: File, tokens: Tokens) -> list[int]:
    """Write the tokenizer; return the row of the table of each token."""
    named = [*((name, tokens.row[SPACE]) for name in SPECIAL), *tokens.pieces()]
    control = {*SPECIAL[:2], BEGIN}
    kinds = [
        gguf.TokenType.CONTROL if name in control else gguf.TokenType.NORMAL for name, _ in named
    ]
    kinds[2] = gguf.TokenType.UNKNOWN
    file.writer.add_tokenizer_model("t5")
    file.writer.add_tokenizer_pre("default")
    file.writer.add_token_list([name for name, _ in named])
    file.writer.add_token_scores([-1.0 if len(name) > 1 else -2.0 for name, _ in named])
    file.writer.add_token_types([int(kind) for kind in kinds])
    file.writer.add_pad_token_id(0)
    file.writer.add_eos_token_id(1)
    file.writer.add_unk_token_id(2)
    file.writer.add_add_space_prefix(True)
    file.writer.add_remove_extra_whitespaces(True)
    file.writer.add_add_bos_token(False)
    file.writer.add_add_eos_token(False)
    return [row for _, row in named]


def write_backbone(output: Path, speaker: Speaker, table: Tensor, tokens: Tokens) -> int:
    """Write the transformer over tokens and frames; return the size of the file."""
    config, file = speaker.config, File(output, "pockettts")
    writer = file.writer
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.heads)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_rope_freq_base(10000.0)
    rows = vocabulary(file, tokens)
    writer.add_vocab_size(len(rows))
    file.add("token_embd.weight", table[rows])
    file.add("output_norm.weight", speaker.norm.weight)
    file.add("output_norm.bias", speaker.norm.bias)
    for index, one in enumerate(speaker.layers):
        for name, value in layer(f"blk.{index}", one, BACKBONE):
            file.add(name, value)
    return file.close()


def flow(speaker: Speaker, mean: Tensor, deviation: Tensor) -> Named:
    """Yield what makes a latent, an end and the next row. Noise goes in, and has no weight."""
    one, config = speaker.flow, speaker.config
    yield "input_linear.weight", speaker.frame / SCALE
    yield "emb_mean", mean
    yield "emb_std", deviation / SCALE
    yield "out_eos.weight", speaker.end
    yield "out_eos.bias", speaker.end_bias + END
    yield "flow.input_proj.weight", torch.zeros(config.flow, config.latent)
    yield "flow.input_proj.bias", one.begin
    yield "flow.cond_embd.weight", one.condition
    yield "flow.cond_embd.bias", one.condition_bias
    yield "flow.final.ada.weight", one.last_ada
    yield "flow.final.ada.bias", one.last_ada_bias
    yield "flow.final.proj.weight", one.last * SCALE
    yield "flow.final.proj.bias", one.last_bias * SCALE
    yield "flow.blk.0.norm.weight", one.norm.weight
    yield "flow.blk.0.norm.bias", one.norm.bias
    for name in ("ada", "up", "down"):
        yield f"flow.blk.0.{name}.weight", one.get_parameter(name)
        yield f"flow.blk.0.{name}.bias", one.get_parameter(f"{name}_bias")
    for index in range(2):  # the time of a single step says nothing
        place = f"flow.time.{index}"
        yield f"{place}.freqs", torch.ones(IDLE // 2)
        for name, columns in (("up", IDLE), ("down", config.flow)):
            yield f"{place}.{name}.weight", torch.zeros(config.flow, columns)
            yield f"{place}.{name}.bias", torch.zeros(config.flow)
        yield f"{place}.norm", torch.zeros(config.flow)


def convolution(name: str, one: nn.Conv1d | nn.ConvTranspose1d) -> Named:
    """Yield a kernel and a bias."""
    assert one.bias is not None
    yield f"{name}.weight", one.weight
    yield f"{name}.bias", one.bias


def decoder(one: Decoder, latent: int) -> Named:
    """Yield the decoder; it does not hear the last numbers of a latent."""
    yield "quant_out.weight", functional.pad(one.quant_out, (0, latent - one.config.latent))
    yield "upsample.weight", one.upsample
    for index, weights in enumerate(one.layers):
        assert isinstance(weights, CausalLayer)
        yield from clip_layer(f"tfm.blk.{index}", weights)
    yield from convolution("seanet.conv_in", one.conv_in)
    yield from convolution("seanet.conv_out", one.conv_out)
    for index, (scale, residual) in enumerate(zip(one.scales, one.residuals, strict=True)):
        yield from convolution(f"seanet.blk.{index}.scale_conv", scale)
        yield from convolution(f"seanet.blk.{index}.res_conv1", residual.first)
        yield from convolution(f"seanet.blk.{index}.res_conv2", residual.second)


def idle(width: int) -> Named:
    """Yield an encoder of recordings whose output is zero."""
    ratios = RATIOS[::-1]
    seanet = {"conv_in": nn.Conv1d(1, IDLE, 1), "conv_out": nn.Conv1d(IDLE, IDLE, 1)}
    for index, ratio in enumerate(ratios):
        seanet[f"blk.{index}.res_conv1"] = nn.Conv1d(IDLE, 1, 1)
        seanet[f"blk.{index}.res_conv2"] = nn.Conv1d(1, IDLE, 1)
        seanet[f"blk.{index}.scale_conv"] = nn.Conv1d(IDLE, IDLE, ratio)
    for name, one in seanet.items():
        for kind, value in convolution(f"seanet.{name}", one):
            yield kind, torch.zeros_like(value)
    for name, value in clip_layer("blk.0", CausalLayer(IDLE, IDLE, 1, 1.0)):
        yield name, torch.zeros_like(value)
    yield "downsample.conv.weight", torch.zeros(IDLE, IDLE, STEPS)
    yield "speaker_proj.weight", torch.zeros(width, IDLE)


def write_projector(
    output: Path, speaker: Speaker, mean: Tensor, deviation: Tensor, one: Decoder
) -> int:
    """Write the flow and the decoder; return the size of the file."""
    file, config, width = File(output, "clip"), one.config, speaker.config.width
    for kind, key, numbers in (
        ("spkenc", "audio", (width, IDLE, IDLE, 1, 1)),
        ("gen", "gen.audio", (width, config.width, config.hidden, config.layers, config.heads)),
    ):
        file.writer.add_bool(f"clip.has_{key.replace('.', '_')}_encoder", True)
        file.writer.add_string(f"clip.{key}.projector_type", f"pockettts_{kind}")
        names = ("projection_dim", "embedding_length", "feed_forward_length", "block_count")
        for name, number in zip((*names, "attention.head_count"), numbers, strict=True):
            file.writer.add_uint32(f"clip.{key}.{name}", number)
        file.writer.add_float32(f"clip.{key}.attention.layer_norm_epsilon", EPSILON)
    file.writer.add_uint32("clip.audio.num_mel_bins", 1)
    file.writer.add_string("clip.gen.audio.model_variant", "bundled")
    for prefix, named in (
        ("a", idle(width)),
        ("a.gen", flow(speaker, mean, deviation)),
        ("a.gen.wav", decoder(one, speaker.config.latent)),
    ):
        for name, value in named:
            file.add(f"{prefix}.{name}", value)
    return file.close()


def load(path: Path) -> tuple[Speaker, nn.Embedding, Tokens, Tensor, Tensor]:
    """Read a checkpoint of ``train_speaker.py``."""
    saved = torch.load(path, weights_only=True)
    speaker = Speaker(SpeakerConfig(**saved["config"]))
    speaker.load_state_dict(saved["speaker"])
    table = nn.Embedding(speaker.config.rows, speaker.config.width)
    table.load_state_dict(saved["table"])
    return speaker, table, Tokens(tuple(saved["words"])), saved["mean"], saved["deviation"]


def load_decoder(path: Path) -> Decoder:
    """Read a checkpoint of ``train_codec.py``."""
    saved = torch.load(path, weights_only=True)
    one = Decoder(CodecConfig(**saved["config"]))
    one.load_state_dict(saved["decoder"])
    return one


def main() -> None:
    """Write checkpoints as a voice."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--speaker", type=Path, required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the speaker's file")
    parser.add_argument("--projector", type=Path, required=True)
    options = parser.parse_args()
    speaker, table, tokens, mean, deviation = load(options.speaker)
    size = write_backbone(options.output, speaker, table.weight, tokens)
    one = load_decoder(options.codec)
    size += write_projector(options.projector, speaker, mean, deviation, one)
    if size > SIZE_LIMIT:
        raise SystemExit(f"{size} bytes is over the limit of {SIZE_LIMIT}")
    print(f"{options.output}, {options.projector}: {size} bytes")


if __name__ == "__main__":
    main()
