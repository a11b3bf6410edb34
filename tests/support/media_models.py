"""Writes tiny models that take images or sound: a text model, and a projector for it.

`write_pair(folder, "gemma3")` gives the paths of both. Weights are random, and the same kind makes
the same files, of some hundred kilobytes each. What such a model says means nothing, but hangs on
what it sees.

=========  ====================  ================================  =================================
kind       text model            an image of 64 x 64               sound
=========  ====================  ================================  =================================
mlp        llama                 16 cells
gemma3     gemma3 (a window)     16 cells that see each other
idefics3   llama                 16 cells; larger ones in tiles
qwen2vl    qwen2vl (M-RoPE)      16 cells, but 4 positions
qwen3a     llama                                                   13 cells a second
ultravox   llama                                                   375 cells for every 30 s begun
mixed      llama                 as mlp                            as qwen3a
=========  ====================  ================================  =================================
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import gguf
import numpy as np

from tests.support import tiny_models
from tests.support.architectures import GENERATING, QWEN2VL, WIDTH, Architecture
from trioserve.types import DecodedAudio, DecodedImage
from trioserve.types.media import content_id

#: The encoders are as wide as the text models.
_LAYERS, _HEADS, _FFN = 2, 4, 64
_IMAGE = 64

#: Samples of sound in a second.
RATE = 16_000

#: Texts around tiles. libmtmd requires each to be a single token.
_TILE_TOKENS = ("ĊĊ", "<fake_token_around_image>", "<global-img>")


@attrs.frozen
class Pair:
    """The paths of a text model and of its projector."""

    model: Path
    projector: Path

    @property
    def settings(self) -> dict[str, str]:
        """Both as fields of `Config`."""
        return {"model": str(self.model), "mmproj": str(self.projector)}

    @property
    def flags(self) -> list[str]:
        """Both as flags, which llama-server has too."""
        return ["--model", str(self.model), "--mmproj", str(self.projector)]


def write_pair(folder: Path, kind: str) -> Pair:
    """Write a text model and a projector, unless they are there; returns their paths."""
    pair = Pair(folder / f"{kind}.gguf", folder / f"mmproj-{kind}.gguf")
    if not pair.model.exists():
        tokens = _TILE_TOKENS if kind == "idefics3" else ()
        tiny_models.write(pair.model, _TEXT.get(kind, GENERATING["llama"]), more_tokens=tokens)
        write_projector(pair.projector, kind)
    return pair


def write_projector(path: Path, kind: str, **metadata: int) -> Path:
    """Write a projector; returns the path. `metadata` replaces integers, dots being underscores."""
    writer = _Writer(path, metadata)
    for part in _PARTS[kind]:
        part(writer, len(_PARTS[kind]) > 1)
    writer.close()
    return path


def random_image(width: int = _IMAGE, height: int = _IMAGE, *, seed: int = 0) -> DecodedImage:
    """Make an image of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels = noise.tobytes()
    size = f"{width} {height}".encode()
    return DecodedImage(width=width, height=height, pixels=pixels, id=content_id(size, pixels))


def random_sound(seconds: float = 1.0, *, seed: int = 0) -> DecodedAudio:
    """Make sound of noise."""
    noise = np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)
    samples = noise.tobytes()
    return DecodedAudio(rate=RATE, samples=samples, id=content_id(b"%d" % RATE, samples))


class _Writer:
    """A file of a projector. Its numbers hang on the names of tensors, so that others may come."""

    def __init__(self, path: Path, replaced: Mapping[str, int]) -> None:
        self._file = gguf.GGUFWriter(str(path), "clip")
        self._file.add_file_type(gguf.LlamaFileType.ALL_F32)
        self._replaced = replaced

    def describe(self, part: str, kind: str, is_mixed: bool, **numbers: int) -> None:
        """Add the metadata of an encoder for images ("vision") or sound ("audio")."""
        self._file.add_bool(f"clip.has_{part}_encoder", True)
        key = f"clip.{part}.projector_type" if is_mixed else "clip.projector_type"
        self._file.add_string(key, kind)
        sizes = {
            "embedding_length": WIDTH,
            "feed_forward_length": _FFN,
            "block_count": _LAYERS,
            "attention.head_count": _HEADS,
            "projection_dim": WIDTH,
            **{name.replace("__", "."): number for name, number in numbers.items()},
        }
        for name, number in sizes.items():
            number = self._replaced.get(name.replace(".", "_"), number)
            self._file.add_uint32(f"clip.{part}.{name}", number)
        self._file.add_float32(f"clip.{part}.attention.layer_norm_epsilon", 1e-6)
        if part == "vision":
            self._file.add_bool("clip.use_gelu", True)
            self._file.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
            self._file.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def matrix(self, name: str, *shape: int, inputs: int | None = None) -> None:
        """Add a tensor that keeps the size of its input; `inputs` are those of an output."""
        values = _rng(name).standard_normal(shape) * (inputs or shape[-1]) ** -0.5
        kind = np.float16 if name.startswith("a.conv1d") else np.float32
        name = name if ".weight" in name else f"{name}.weight"
        self._file.add_tensor(name, values.astype(kind))

    def bias(self, name: str, *shape: int) -> None:
        """Add a small bias."""
        values = 0.1 * _rng(f"{name}.bias").standard_normal(shape)
        self._file.add_tensor(f"{name}.bias", values.astype(np.float32))

    def layer(self, name: str, outputs: int, inputs: int) -> None:
        """Add a matrix and its bias."""
        self.matrix(name, outputs, inputs)
        self.bias(name, outputs)

    def norm(self, name: str, *, size: int = WIDTH, has_bias: bool = True) -> None:
        """Add what a norm multiplies with, and its bias."""
        self._file.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))
        if has_bias:
            self.bias(name, size)

    def blocks(self, prefix: str, *, n: int = _LAYERS, key_bias: bool = True) -> None:
        """Add the layers of a transformer."""
        for block in (f"{prefix}.blk.{i}" for i in range(n)):
            self.norm(f"{block}.ln1")
            self.norm(f"{block}.ln2")
            for name in ("attn_q", "attn_v", "attn_out"):
                self.layer(f"{block}.{name}", WIDTH, WIDTH)
            self.matrix(f"{block}.attn_k", WIDTH, WIDTH)
            if key_bias:
                self.bias(f"{block}.attn_k", WIDTH)
            self.layer(f"{block}.ffn_up", _FFN, WIDTH)
            self.layer(f"{block}.ffn_down", WIDTH, _FFN)

    def close(self) -> None:
        """Write the file."""
        self._file.write_header_to_file()
        self._file.write_kv_data_to_file()
        self._file.write_tensors_to_file()
        self._file.close()


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


# -- images


def _siglip(writer: _Writer, patch: int) -> None:
    """Add patches, their positions, and the encoder."""
    writer.matrix("v.patch_embd", WIDTH, 3, patch, patch, inputs=3 * patch * patch)
    writer.bias("v.patch_embd", WIDTH)
    writer.matrix("v.position_embd", (_IMAGE // patch) ** 2, WIDTH)
    writer.blocks("v")
    writer.norm("v.post_ln")


def _mlp(writer: _Writer, is_mixed: bool) -> None:
    """A cell for each patch."""
    writer.describe("vision", "mlp", is_mixed, image_size=_IMAGE, patch_size=16)
    _siglip(writer, 16)
    writer.layer("mm.0", WIDTH, WIDTH)
    writer.layer("mm.2", WIDTH, WIDTH)


def _gemma3(writer: _Writer, is_mixed: bool) -> None:
    """A cell for four patches."""
    sizes = {"image_size": _IMAGE, "patch_size": 8, "projector__scale_factor": 2}
    writer.describe("vision", "gemma3", is_mixed, **sizes)
    _siglip(writer, 8)
    writer.norm("mm.soft_emb_norm", has_bias=False)
    writer.matrix("mm.input_projection", WIDTH, WIDTH)


def _idefics3(writer: _Writer, is_mixed: bool) -> None:
    """The image as a whole, and if it is larger than a tile, each tile of it."""
    sizes = {"image_size": _IMAGE, "patch_size": 8, "projector__scale_factor": 2}
    writer.describe("vision", "idefics3", is_mixed, **sizes, preproc_image_size=4 * _IMAGE)
    _siglip(writer, 8)
    writer.matrix("mm.model.fc", WIDTH, 4 * WIDTH)


def _qwen2vl(writer: _Writer, is_mixed: bool) -> None:
    """One cell for four patches. The number of patches follows from the size of the image."""
    writer.describe("vision", "qwen2vl_merger", is_mixed, image_size=560, patch_size=14)
    writer.matrix("v.patch_embd", WIDTH, 3, 14, 14, inputs=3 * 14 * 14)
    writer.matrix("v.patch_embd.weight.1", WIDTH, 3, 14, 14, inputs=3 * 14 * 14)
    writer.blocks("v")
    writer.norm("v.post_ln")
    writer.layer("mm.0", 4 * WIDTH, 4 * WIDTH)
    writer.layer("mm.2", WIDTH, 4 * WIDTH)


# -- sound

_BINS, _CHANNELS, _STACK, _HIDDEN = 32, 16, 4, 32


def _qwen3a(writer: _Writer, is_mixed: bool) -> None:
    """Three convolutions; each halves the number of frames."""
    writer.describe("audio", "qwen3a", is_mixed, num_mel_bins=_BINS)
    for i, channels in ((1, 1), (2, _CHANNELS), (3, _CHANNELS)):
        writer.matrix(f"a.conv2d.{i}", _CHANNELS, channels, 3, 3, inputs=9 * channels)
        writer.bias(f"a.conv2d.{i}", _CHANNELS)
    writer.matrix("a.conv_out", WIDTH, _CHANNELS * _BINS // 8)
    writer.matrix("a.position_embd", 13, WIDTH)
    writer.blocks("a")
    writer.norm("a.post_ln")
    writer.layer("mm.a.mlp.1", WIDTH, WIDTH)
    writer.layer("mm.a.mlp.2", WIDTH, WIDTH)


def _ultravox(writer: _Writer, is_mixed: bool) -> None:
    """Windows of 1,500 frames; every four frames are a cell."""
    sizes = {"num_mel_bins": 80, "projector__stack_factor": _STACK}
    writer.describe("audio", "ultravox", is_mixed, **sizes)
    for i, channels in ((1, 80), (2, WIDTH)):
        writer.matrix(f"a.conv1d.{i}", WIDTH, channels, 3, inputs=3 * channels)
        writer.bias(f"a.conv1d.{i}", WIDTH, 1)
    writer.matrix("a.position_embd", 1500, WIDTH)
    writer.blocks("a", key_bias=False)
    writer.norm("a.post_ln")
    writer.norm("mm.a.norm_pre", size=WIDTH * _STACK, has_bias=False)
    writer.norm("mm.a.norm_mid", size=_HIDDEN, has_bias=False)
    writer.matrix("mm.a.mlp.1", 2 * _HIDDEN, WIDTH * _STACK)
    writer.matrix("mm.a.mlp.2", WIDTH, _HIDDEN)


_PARTS: Mapping[str, tuple[Callable[[_Writer, bool], None], ...]] = {
    "mlp": (_mlp,),
    "gemma3": (_gemma3,),
    "idefics3": (_idefics3,),
    "qwen2vl": (_qwen2vl,),
    "qwen3a": (_qwen3a,),
    "ultravox": (_ultravox,),
    "mixed": (_mlp, _qwen3a),
}
_TEXT: Mapping[str, Architecture] = {"gemma3": GENERATING["gemma3"], "qwen2vl": QWEN2VL}

KINDS = tuple(_PARTS)
