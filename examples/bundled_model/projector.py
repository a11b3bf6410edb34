"""Write the eyes and the ears as one projector file: Q8_0 matrices, the rest F16 and F32."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from examples.bundled_model.sound.encoder import EPSILON as EARS_EPSILON, Ears, EarsConfig
from examples.bundled_model.vision.encoder import EPSILON as EYES_EPSILON, Eyes, EyesConfig

SIZE_LIMIT = 2_000_000
LAYER = {
    "ln1": ("ln1_weight", "ln1_bias"),
    "ln2": ("ln2_weight", "ln2_bias"),
    "attn_q": ("q", "q_bias"),
    "attn_k": ("k", "k_bias"),
    "attn_v": ("v", "v_bias"),
    "attn_out": ("out", "out_bias"),
    "ffn_up": ("up", "up_bias"),
    "ffn_down": ("down", "down_bias"),
}

EYES = {
    "patches": "v.patch_embd.weight",
    "patches_bias": "v.patch_embd.bias",
    "positions": "v.position_embd.weight",
    "post_weight": "v.post_ln.weight",
    "post_bias": "v.post_ln.bias",
    "first": "mm.0.weight",
    "first_bias": "mm.0.bias",
    "second": "mm.2.weight",
    "second_bias": "mm.2.bias",
}
EARS = {
    **{
        f"convolutions.{index}.{kind}": f"a.conv2d.{index + 1}.{kind}"
        for index in range(3)
        for kind in ("weight", "bias")
    },
    "conv_out": "a.conv_out.weight",
    "positions": "a.position_embd.weight",
    "post_weight": "a.post_ln.weight",
    "post_bias": "a.post_ln.bias",
    "first": "mm.a.mlp.1.weight",
    "first_bias": "mm.a.mlp.1.bias",
    "second": "mm.a.mlp.2.weight",
    "second_bias": "mm.a.mlp.2.bias",
}

Array = npt.NDArray[np.float32]


class Projector:
    """The file in the making."""

    def __init__(self, path: Path, *, mixed: bool) -> None:
        self.mixed = mixed
        self.writer = gguf.GGUFWriter(path, "clip")
        self.writer.add_name("trioserve bundled: eyes and ears")
        self.writer.add_license("MIT")
        self.writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        self.writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def numbers(self, sense: str, kind: str, **values: int) -> None:
        """Write the sizes of one encoder."""
        self.writer.add_bool(f"clip.has_{sense}_encoder", True)
        key = f"clip.{sense}.projector_type" if self.mixed else "clip.projector_type"
        self.writer.add_string(key, kind)
        for name, value in values.items():
            self.writer.add_uint32(
                f"clip.{sense}.{name.replace('heads', 'attention.head_count')}", value
            )

    def matrix(self, name: str, value: nn.Parameter) -> None:
        """Write the weights of a linear map."""
        q8 = gguf.GGMLQuantizationType.Q8_0
        self.writer.add_tensor(name, gguf.quants.quantize(_array(value), q8), raw_dtype=q8)

    def small(self, name: str, value: Array, kind: type[np.floating] = np.float32) -> None:
        """Write what is not quantized."""
        self.writer.add_tensor(name, np.ascontiguousarray(value.astype(kind)))

    def linear(self, name: str, weight: nn.Parameter, bias: nn.Parameter) -> None:
        """Write a linear map and its bias."""
        self.matrix(f"{name}.weight", weight)
        self.small(f"{name}.bias", _array(bias))

    def layers(self, prefix: str, layers: nn.ModuleList) -> None:
        """Write the layers of a transformer."""
        for index, layer in enumerate(layers):
            for name, (weight, bias) in LAYER.items():
                place = f"{prefix}.blk.{index}.{name}"
                if name.startswith("ln"):
                    self.small(f"{place}.weight", _array(getattr(layer, weight)))
                    self.small(f"{place}.bias", _array(getattr(layer, bias)))
                else:
                    self.linear(place, getattr(layer, weight), getattr(layer, bias))

    def eyes(self, eyes: Eyes) -> None:
        """Write the eyes as projector type ``mlp``."""
        config = eyes.config
        self.numbers(
            "vision",
            "mlp",
            image_size=config.size,
            patch_size=config.patch,
            embedding_length=config.width,
            feed_forward_length=config.hidden,
            block_count=config.layers,
            projection_dim=config.text_width,
            heads=config.heads,
        )
        self.writer.add_bool("clip.use_gelu", True)
        self.writer.add_float32("clip.vision.attention.layer_norm_epsilon", EYES_EPSILON)
        self.writer.add_array("clip.vision.image_mean", [0.5] * 3)
        self.writer.add_array("clip.vision.image_std", [0.5] * 3)
        # Without this the last layer would be left out.
        self.writer.add_array("clip.vision.feature_layer", [config.layers])
        patches = _array(eyes.patches).reshape(config.width, 3, config.patch, config.patch)
        self.small("v.patch_embd.weight", patches, np.float16)
        self.small("v.patch_embd.bias", _array(eyes.patches_bias))
        self.small("v.position_embd.weight", _array(eyes.positions))
        self.layers("v", eyes.layers)
        self.small("v.post_ln.weight", _array(eyes.post_weight))
        self.small("v.post_ln.bias", _array(eyes.post_bias))
        self.linear("mm.0", eyes.first, eyes.first_bias)
        self.linear("mm.2", eyes.second, eyes.second_bias)

    def ears(self, ears: Ears) -> None:
        """Write the ears as projector type ``qwen3a``."""
        config = ears.config
        self.numbers(
            "audio",
            "qwen3a",
            embedding_length=config.width,
            feed_forward_length=config.hidden,
            block_count=config.layers,
            projection_dim=config.text_width,
            num_mel_bins=config.bands,
            heads=config.heads,
        )
        self.writer.add_float32("clip.audio.attention.layer_norm_epsilon", EARS_EPSILON)
        for index, convolution in enumerate(ears.convolutions, 1):
            self.small(f"a.conv2d.{index}.weight", _array(convolution.weight), np.float16)
            self.small(f"a.conv2d.{index}.bias", _array(convolution.bias))
        self.matrix("a.conv_out.weight", ears.conv_out)
        self.small("a.position_embd.weight", _array(ears.positions))
        self.layers("a", ears.layers)
        self.small("a.post_ln.weight", _array(ears.post_weight))
        self.small("a.post_ln.bias", _array(ears.post_bias))
        self.linear("mm.a.mlp.1", ears.first, ears.first_bias)
        self.linear("mm.a.mlp.2", ears.second, ears.second_bias)

    def close(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _array(value: torch.Tensor) -> Array:
    array: Array = value.detach().float().cpu().numpy()
    return array


def _read(path: Path, encoder: nn.Module, prefix: str, names: dict[str, str]) -> None:
    """Fill an encoder from a projector file."""
    for index in range(encoder.config.layers):
        for theirs, ours in LAYER.items():
            for kind, one in zip(("weight", "bias"), ours, strict=True):
                names[f"layers.{index}.{one}"] = f"{prefix}.blk.{index}.{theirs}.{kind}"
    stored = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    encoder.load_state_dict(
        {
            ours: torch.tensor(stored[names[ours]]).reshape(value.shape)
            for ours, value in encoder.state_dict().items()
        }
    )


def load_eyes(path: Path) -> Eyes:
    """Read eyes from a checkpoint, or from a projector file."""
    if path.suffix == ".gguf":
        eyes = Eyes(EyesConfig())
        _read(path, eyes, "v", dict(EYES))
        return eyes.eval()
    saved = torch.load(path, map_location="cpu", weights_only=True)
    eyes = Eyes(EyesConfig(**saved["config"]))
    eyes.load_state_dict(saved["eyes"])
    return eyes.eval()


def load_ears(path: Path) -> Ears:
    """Read ears from a checkpoint, or from a projector file."""
    if path.suffix == ".gguf":
        ears = Ears(EarsConfig())
        _read(path, ears, "a", dict(EARS))
        return ears.eval()
    saved = torch.load(path, map_location="cpu", weights_only=True)
    ears = Ears(EarsConfig(**saved["config"]))
    ears.load_state_dict(saved["ears"])
    return ears.eval()


def write(output: Path, eyes: Eyes | None, ears: Ears | None) -> int:
    """Write the file beside its place, then move it there. Return its size."""
    part = output.with_name(output.name + ".part")
    projector = Projector(part, mixed=eyes is not None and ears is not None)
    if eyes is not None:
        projector.eyes(eyes)
    if ears is not None:
        projector.ears(ears)
    projector.close()
    size = part.stat().st_size
    if size > SIZE_LIMIT:
        part.unlink()
        raise SystemExit(f"{size} bytes is over the limit of {SIZE_LIMIT}")
    os.replace(part, output)
    return size


def main() -> None:
    """Write checkpoints as a projector file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--eyes", type=Path)
    parser.add_argument("--ears", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    eyes = load_eyes(options.eyes) if options.eyes else None
    ears = load_ears(options.ears) if options.ears else None
    print(f"{options.output}: {write(options.output, eyes, ears)} bytes")


if __name__ == "__main__":
    main()
