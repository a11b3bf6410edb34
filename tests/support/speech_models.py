"""Writes tiny models that speak: a backbone and a projector for it, with random weights.

`write_pocket` makes them as Pocket TTS is made, and `write_qwen` as Qwen3-TTS. The same arguments
make the same files, of some hundred kilobytes. libmtmd fixes the shape of what makes the sound;
only the channels are few here. What is said sounds like noise, but hangs on text, voice and seed.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import attrs
import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.gguf_maker import vocabulary
from trioserve.types import DecodedAudio
from trioserve.types.media import content_id

WIDTH, LAYERS, HEADS, FFN = 32, 2, 4, 64
RATE = 24_000
#: The frames of both families have as many samples.
FRAME = 1920

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = dict[str, Shape]
Change: TypeAlias = Callable[[dict[str, NDArray[np.floating]]], None]


_ABOUT_ONE = ("norm.weight", "ln1.weight", "ln2.weight", ".norm", "emb_std", "alpha")


def _unchanged(_tensors: dict[str, NDArray[np.floating]]) -> None:
    pass


@attrs.frozen
class SpeechPair:
    """The paths of a backbone and of its projector."""

    model: Path
    projector: Path

    @property
    def settings(self) -> dict[str, str]:
        """Both as fields of `Config`."""
        return {"tts": str(self.model), "tts_mmproj": str(self.projector)}


def recording(seconds: float = 1.0, *, seed: int = 0) -> DecodedAudio:
    """Make a recording of noise."""
    noise = np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)
    samples = noise.tobytes()
    return DecodedAudio(rate=RATE, samples=samples, id=content_id(b"%d" % RATE, samples))


class _File:
    """A GGUF file. Its numbers hang on the names of tensors, so that others may come and go."""

    def __init__(self, path: Path, arch: str, seed: int) -> None:
        self.writer = gguf.GGUFWriter(str(path), arch)
        self.writer.add_name(path.stem)
        self.writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        self._arch, self._seed = arch, seed

    def describe(self, prefix: str, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            add = self.writer.add_float32 if isinstance(value, float) else self.writer.add_uint32
            add(f"{prefix}.{key}", value)

    def finish(self, shapes: Shapes, change: Change, quantized: Mapping[str, str]) -> None:
        """Write the tensors; `quantized` names the types of some of them."""
        tensors = {name: self._tensor(name, shape) for name, shape in shapes.items()}
        change(tensors)
        for name, tensor in tensors.items():
            kind = quantized.get(name, "F16" if _is_convolution(name, tensor) else "F32")
            type_ = gguf.GGMLQuantizationType[kind]
            self.writer.add_tensor(name, gguf.quants.quantize(tensor, type_), raw_dtype=type_)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _tensor(self, name: str, shape: Shape) -> NDArray[np.floating]:
        noise = np.random.default_rng([self._seed, zlib.crc32(name.encode())]).normal(0, 1, shape)
        if name == "a.gen.out_eos.bias":
            values = np.full(
                shape, -5.5
            )  # the threshold is -4: about one frame of fourteen is the last
        elif name.endswith(
            ("norm.weight", "ln1.weight", "ln2.weight", ".norm", "emb_std", "alpha")
        ):
            values = 1 + 0.1 * noise
        elif name.endswith((".bias", "emb_mean", "freqs")):
            values = 0.1 * noise
        elif name.endswith((".beta", "gamma", "ls1.weight", "ls2.weight")):
            values = 0.3 + 0.1 * noise
        elif "post_conv" in name or "seanet.conv_out" in name:
            values = 0.02 * noise  # sound that is not too loud
        else:
            values = noise * float(np.prod(shape[1:])) ** -0.5
        return values.astype(np.float32)


def _is_convolution(name: str, tensor: NDArray[np.floating]) -> bool:
    """True for the kernels that ggml wants in 16 bits."""
    return tensor.ndim == 3 and "codebook" not in name and not name.startswith("a.gen.code")


def _with_bias(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _attention(prefix: str, width: int, inner: int, kv: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.attn_q.weight", (inner, width)
    yield f"{prefix}.attn_k.weight", (kv, width)
    yield f"{prefix}.attn_v.weight", (kv, width)


# -- Pocket TTS

_LATENT, _POCKET_CHANNELS, _FLOW = 8, 16, 16
_RATIOS = (6, 5, 4)  # of the decoder, whose frames are 16 times as long
#: The name of a pack that libmtmd has settings for: short texts are padded.
VARIANT = "english_2026-01"
POCKET_TOKENS = ("<|pad|>", "<|bos_before_voice|>", "<|audio_bos|>")


def write_pocket(
    folder: Path,
    *,
    seed: int = 0,
    width: int = WIDTH,
    variant: str = VARIANT,
    special: tuple[str, ...] = POCKET_TOKENS,
    change: Change = _unchanged,
    change_projector: Change = _unchanged,
    quantized: Mapping[str, str] = {},
) -> SpeechPair:
    """Write both files into a folder.

    The `change` functions get the tensors before they are written; `quantized` has the types of
    some tensors of the backbone.
    """
    pair = SpeechPair(folder / "pocket.gguf", folder / "mmproj-pocket.gguf")
    model = _File(pair.model, "pockettts", seed)
    model.describe("pockettts", {
        "context_length": 1024, "embedding_length": width, "block_count": LAYERS,
        "feed_forward_length": FFN, "attention.head_count": HEADS,
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0,
    })  # fmt: skip
    n_vocab = _unigrams(model.writer, special)
    shapes: Shapes = {"token_embd.weight": (n_vocab, width)}
    shapes |= _with_bias("output_norm", width)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= _with_bias(f"{block}.attn_norm", width) | _with_bias(f"{block}.ffn_norm", width)
        shapes |= dict(_attention(block, width, width, width))
        shapes[f"{block}.attn_output.weight"] = (width, width)
        shapes[f"{block}.ffn_up.weight"] = (FFN, width)
        shapes[f"{block}.ffn_down.weight"] = (width, FFN)
    model.finish(shapes, change, quantized)
    projector = _File(pair.projector, "clip", seed)
    _describe_parts(projector, "pockettts", _POCKET_CHANNELS, width, LAYERS, 2)
    projector.writer.add_uint32("clip.audio.num_mel_bins", 1)
    projector.writer.add_string("clip.gen.audio.model_variant", variant)
    projector.finish(_pocket_shapes(width), change_projector, {})
    return pair


def _describe_parts(
    file: _File, kind: str, channels: int, width: int, n_layers: int, n_heads: int
) -> None:
    for part, name in (("audio", "spkenc"), ("gen.audio", "gen")):
        file.writer.add_bool(f"clip.has_{part.replace('.', '_')}_encoder", True)
        file.writer.add_string(f"clip.{part}.projector_type", f"{kind}_{name}")
        file.describe(f"clip.{part}", {
            "embedding_length": channels, "feed_forward_length": 2 * channels,
            "block_count": n_layers, "attention.head_count": n_heads, "projection_dim": width,
            "attention.layer_norm_epsilon": 1e-5,
        })  # fmt: skip


def _unigrams(writer: gguf.GGUFWriter, special: tuple[str, ...]) -> int:
    """Add a vocabulary of letters and some words; returns its size."""
    mark = "\u2581"
    words = [mark + word for word in ("the", "cat", "sat", "on", "mat", "hello", "one", "two")]
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, mark]
    tokens = ["<unk>", "<s>", "</s>", *words, *letters, *special]
    kinds = gguf.TokenType
    n_normal = len(words) + len(letters)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    scores = [0.0] * 3 + [-1.0] * len(words) + [-4.0] * len(letters) + [-1000.0] * len(special)
    writer.add_token_scores(scores)
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
        + [kinds.NORMAL] * n_normal
        + [kinds.CONTROL] * len(special)
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(False)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    return len(tokens)


def _pocket_shapes(width: int) -> Shapes:
    channels, flow = _POCKET_CHANNELS, _FLOW
    shapes: Shapes = {
        "a.speaker_proj.weight": (width, _LATENT),
        "a.downsample.conv.weight": (_LATENT, channels, 32),
        "a.gen.input_linear.weight": (width, _LATENT),
        "a.gen.emb_mean": (_LATENT,),
        "a.gen.emb_std": (_LATENT,),
        "a.gen.wav.quant_out.weight": (channels, _LATENT),
        "a.gen.wav.upsample.weight": (channels, 1, 32),
    }
    shapes |= _with_bias("a.gen.out_eos", 1, width)
    for prefix in ("a", "a.gen.wav.tfm"):
        for layer in range(LAYERS):
            block = f"{prefix}.blk.{layer}"
            shapes |= dict(_attention(block, channels, channels, channels))
            shapes |= _with_bias(f"{block}.ln1", channels) | _with_bias(f"{block}.ln2", channels)
            shapes |= {
                f"{block}.attn_out.weight": (channels, channels),
                f"{block}.ls1.weight": (channels,),
                f"{block}.ls2.weight": (channels,),
                f"{block}.ffn_up.weight": (2 * channels, channels),
                f"{block}.ffn_down.weight": (channels, 2 * channels),
            }
    shapes |= _flow_shapes(width, flow)
    # The encoder doubles its channels at each stage, and the decoder halves them.
    shapes |= _with_bias("a.seanet.conv_in", 2, 1, 7)
    shapes |= _with_bias("a.gen.wav.seanet.conv_in", 16, channels, 7)
    for stage, ratio in enumerate(_RATIOS):
        inside, outside = 2 << stage, 16 >> stage
        down, up = f"a.seanet.blk.{stage}", f"a.gen.wav.seanet.blk.{stage}"
        shapes |= _residual(down, inside)
        stride = _RATIOS[-1 - stage]
        shapes |= _with_bias(f"{down}.scale_conv", 2 * inside, inside, 2 * stride)
        shapes[f"{up}.scale_conv.weight"] = (outside, outside // 2, 2 * ratio)
        shapes[f"{up}.scale_conv.bias"] = (outside // 2,)
        shapes |= _residual(up, outside // 2)
    shapes |= _with_bias("a.seanet.conv_out", channels, 16, 3)
    shapes |= _with_bias("a.gen.wav.seanet.conv_out", 1, 2, 3)
    return shapes


def _residual(prefix: str, channels: int) -> Shapes:
    half = max(1, channels // 2)
    return {
        **_with_bias(f"{prefix}.res_conv1", half, channels, 3),
        **_with_bias(f"{prefix}.res_conv2", channels, half, 1),
    }


def _flow_shapes(width: int, flow: int) -> Shapes:
    shapes = _with_bias("a.gen.flow.input_proj", flow, _LATENT)
    shapes |= _with_bias("a.gen.flow.cond_embd", flow, width)
    shapes |= _with_bias("a.gen.flow.final.ada", 2 * flow, flow)
    shapes |= _with_bias("a.gen.flow.final.proj", _LATENT, flow)
    for i in range(2):
        time = f"a.gen.flow.time.{i}"
        shapes[f"{time}.freqs"] = (8,)
        shapes[f"{time}.norm"] = (flow,)
        shapes |= _with_bias(f"{time}.up", flow, 16) | _with_bias(f"{time}.down", flow, flow)
        block = f"a.gen.flow.blk.{i}"
        shapes |= _with_bias(f"{block}.norm", flow) | _with_bias(f"{block}.ada", 3 * flow, flow)
        shapes |= _with_bias(f"{block}.up", flow, flow) | _with_bias(f"{block}.down", flow, flow)
    return shapes


# -- Qwen3-TTS

#: Rows of the output; libmtmd fixes them. Of these, the first are codes.
_CODEC, _N_CODES = 3072, 2048
_LANGUAGES = ("english", "german", "chinese")
#: The row of the output that ends a text.
END_ROW = _N_CODES + 2
#: Codebooks of a frame.
N_BOOKS = 16
_PREDICTOR, _BOOK, _QUANT, _C2W = 16, 64, 8, 16
_C2W_HEADS, _C2W_LAYERS = 16, 8


def write_qwen(
    folder: Path,
    *,
    seed: int = 0,
    width: int = WIDTH,
    change: Change = _unchanged,
    change_projector: Change = _unchanged,
    quantized: Mapping[str, str] = {},
    left_out: tuple[str, ...] = (),
) -> SpeechPair:
    """Write both files into a folder, as `write_pocket`. `left_out` are names of special tokens."""
    pair = SpeechPair(folder / "qwen.gguf", folder / "mmproj-qwen.gguf")
    model = _File(pair.model, "qwen3tts", seed)
    head = width // HEADS
    model.describe("qwen3tts", {
        "context_length": 1024, "embedding_length": width, "block_count": LAYERS,
        "feed_forward_length": FFN, "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS // 2, "attention.key_length": head,
        "attention.value_length": head, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    })  # fmt: skip
    model.writer.add_array("qwen3tts.rope.dimension_sections", [2, 1, 1, 0])
    n_vocab = _codec_vocabulary(model.writer, left_out)
    shapes: Shapes = {
        "token_embd.weight": (n_vocab, width),
        "output_norm.weight": (width,),
        "output.weight": (_CODEC, width),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= dict(_attention(block, width, width, width // 2))
        shapes |= {
            f"{block}.attn_norm.weight": (width,),
            f"{block}.ffn_norm.weight": (width,),
            f"{block}.attn_q_norm.weight": (head,),
            f"{block}.attn_k_norm.weight": (head,),
            f"{block}.attn_output.weight": (width, width),
            f"{block}.ffn_gate.weight": (FFN, width),
            f"{block}.ffn_up.weight": (FFN, width),
            f"{block}.ffn_down.weight": (width, FFN),
        }
    model.finish(shapes, change, quantized)
    projector = _File(pair.projector, "clip", seed)
    _describe_parts(projector, "qwen3tts", _PREDICTOR, width, 3, 2)
    projector.writer.add_uint32("clip.audio.num_mel_bins", 128)
    projector.finish(_qwen_shapes(width), change_projector, quantized)
    return pair


def _codec_vocabulary(writer: gguf.GGUFWriter, left_out: tuple[str, ...]) -> int:
    """Add a vocabulary of byte pairs, and the codes after it; returns its size."""
    size = 512
    tokens, merges, types = vocabulary(size)
    special = ("assistant", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
    place = size - 3 - len(special)
    tokens[place : place + len(special)] = special
    for i, token in enumerate(special, place):
        is_word = token == "assistant"
        types[i] = int(gguf.TokenType.USER_DEFINED if is_word else gguf.TokenType.CONTROL)
    named = ("pad", "bos", "eos_token", "think", "think_bos", "think_eos")
    codec = [
        *(f"<|codec_{i}|>" for i in range(_N_CODES)),
        *(f"<|codec_{name}|>" for name in named),
        *(f"<|codec_language_{name}|>" for name in _LANGUAGES),
    ]
    codec += [f"<|codec_{i}|>" for i in range(len(codec), _CODEC)]
    tokens += codec
    types += [int(gguf.TokenType.CONTROL)] * _CODEC
    tokens = [f"<unused_{i}>" if one in left_out else one for i, one in enumerate(tokens)]
    eos = tokens.index("<|codec_eos_token|>") if "<|codec_eos_token|>" in tokens else size
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges[: -len(special)])
    writer.add_token_types(types)
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    suppressed = [i for i in range(size + _N_CODES, size + _CODEC) if i != eos]
    writer.add_array("tokenizer.ggml.suppress_tokens", suppressed)
    return len(tokens)


def _qwen_shapes(width: int) -> Shapes:
    inner = _PREDICTOR
    shapes: Shapes = {
        "a.gen.code.embd.weight": (N_BOOKS - 1, _BOOK, width),
        "a.gen.code.head.weight": (N_BOOKS - 1, _BOOK, inner),
        "a.gen.code.out_embd.weight": (_N_CODES, width),
        "a.gen.code.output_norm.weight": (inner,),
    }
    shapes |= _with_bias("a.gen.code.proj_in", inner, width)
    for layer in range(3):
        block = f"a.gen.code.blk.{layer}"
        shapes |= dict(_attention(block, inner, inner, inner))
        shapes |= {
            f"{block}.attn_q_norm.weight": (inner // 2,),
            f"{block}.attn_k_norm.weight": (inner // 2,),
            f"{block}.attn_out.weight": (inner, inner),
            f"{block}.ln1.weight": (inner,),
            f"{block}.ln2.weight": (inner,),
            f"{block}.ffn_gate.weight": (2 * inner, inner),
            f"{block}.ffn_up.weight": (2 * inner, inner),
            f"{block}.ffn_down.weight": (inner, 2 * inner),
        }
    return shapes | _code_to_wave_shapes() | _speaker_shapes(width)


def _code_to_wave_shapes() -> Shapes:
    wide, quant, wav = _C2W, _QUANT, "a.gen.wav"
    shapes: Shapes = {
        f"{wav}.quant.first.in_proj.weight": (quant, wide),
        f"{wav}.quant.first.out_proj.weight": (wide, quant),
        f"{wav}.quant.first.codebook.weight": (_N_CODES, quant),
        f"{wav}.quant.rest.in_proj.weight": (quant, wide),
        f"{wav}.quant.rest.out_proj.weight": (wide, quant),
        f"{wav}.quant.rest.codebook.weight": (N_BOOKS - 1, _BOOK, quant),
        f"{wav}.tfm.output_norm.weight": (wide,),
    }
    shapes |= _with_bias(f"{wav}.pre_conv", wide, wide, 3)
    shapes |= _with_bias(f"{wav}.tfm.in_proj", wide, wide)
    shapes |= _with_bias(f"{wav}.tfm.out_proj", wide, wide)
    inner = 2 * _C2W_HEADS
    for layer in range(_C2W_LAYERS):
        block = f"{wav}.tfm.blk.{layer}"
        shapes |= dict(_attention(block, wide, inner, inner))
        shapes |= {
            f"{block}.attn_out.weight": (wide, inner),
            f"{block}.ln1.weight": (wide,),
            f"{block}.ln2.weight": (wide,),
            f"{block}.ls1.weight": (wide,),
            f"{block}.ls2.weight": (wide,),
            f"{block}.ffn_gate.weight": (wide, wide),
            f"{block}.ffn_up.weight": (wide, wide),
            f"{block}.ffn_down.weight": (wide, wide),
        }
    for i in range(2):
        up = f"{wav}.up.blk.{i}"
        shapes[f"{up}.conv.weight"], shapes[f"{up}.conv.bias"] = (wide, wide, 2), (wide,)
        shapes |= _with_bias(f"{up}.norm", wide)
        shapes[f"{up}.dwconv.weight"], shapes[f"{up}.dwconv.bias"] = (wide, 1, 7), (wide,)
        shapes |= _with_bias(f"{up}.pw1", wide, wide) | _with_bias(f"{up}.pw2", wide, wide)
        shapes[f"{up}.gamma"] = (wide,)
    shapes |= _with_bias(f"{wav}.dac.entry", wide, wide, 7)
    channels = wide
    for i, stride in enumerate((8, 5, 4, 3)):
        block, half = f"{wav}.dac.blk.{i}", max(2, channels // 2)
        shapes |= _snake(f"{block}.snake", channels)
        shapes[f"{block}.conv.weight"] = (channels, half, 2 * stride)
        shapes[f"{block}.conv.bias"] = (half,)
        for j in range(3):
            unit = f"{block}.res.{j}"
            shapes |= _snake(f"{unit}.act1", half) | _snake(f"{unit}.act2", half)
            shapes |= _with_bias(f"{unit}.conv1", half, half, 7)
            shapes |= _with_bias(f"{unit}.conv2", half, half, 1)
        channels = half
    shapes |= _snake(f"{wav}.dac.post_snake", channels)
    return shapes | _with_bias(f"{wav}.dac.post_conv", 1, channels, 7)


def _snake(name: str, channels: int) -> Shapes:
    return {f"{name}.alpha": (channels,), f"{name}.beta": (channels,)}


def _speaker_shapes(width: int) -> Shapes:
    channels = 16
    shapes = _with_bias("a.conv1d.0", channels, 128, 5)
    for layer in (1, 2, 3):
        block = f"a.blk.{layer}"
        shapes |= _with_bias(f"{block}.conv_pw1", channels, channels, 1)
        shapes |= _with_bias(f"{block}.conv_pw2", channels, channels, 1)
        shapes |= _with_bias(f"{block}.se_conv1", 4, channels, 1)
        shapes |= _with_bias(f"{block}.se_conv2", channels, 4, 1)
        for i in range(7):
            shapes |= _with_bias(f"{block}.res2.{i}", channels // 8, channels // 8, 3)
    shapes |= _with_bias("a.conv_out", 3 * channels, 3 * channels, 1)
    shapes |= _with_bias("a.asp_tdnn", 8, 9 * channels, 1)
    shapes |= _with_bias("a.asp_attn", 3 * channels, 8, 1)
    return shapes | _with_bias("mm.a.fc", width, 6 * channels, 1)
