"""What the tensors of a GGUF file must be, by its header: their types, ranks, shapes and names.

llama.cpp takes these for granted, and ends the process where it is wrong, at the first token or the
first image. It checks the shapes in a model itself, but none in a projector. The rules here hold
for all files that work; what is special to an architecture is found by trying the file out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from trioserve.models.gguf import Tensor

_F32 = 0
_FLOATS = {_F32: "F32", 1: "F16", 30: "BF16"}
#: ggml's types that no weights are of: it computes with them only, or not at all. Others, which may
#: be newer than this list, are blocks of weights.
_NO_WEIGHTS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_NAMES = {**_FLOATS, **_NO_WEIGHTS}

#: What is added or multiplied element by element, whatever its rank.
_VECTOR = re.compile(rb".*(\.bias|norm\.weight|\.ssm_a|\.ssm_d|\.scale)")
#: Tables of numbers of tokens and of experts.
_TABLE = re.compile(rb".*(tid2eid|d2t|position_ids)(\.weight)?")

#: A tensor of the file by its name.
Tensors = Mapping[bytes, Tensor]


def by_name(tensors: Iterable[Tensor]) -> dict[bytes, Tensor]:
    """Sort tensors by their names."""
    return {one.name: one for one in tensors}


def model_problems(tensors: Tensors, file_size: int) -> Iterator[str]:
    """Find what is wrong with the tensors of a model, each as a part of a sentence."""
    yield from _types(tensors)
    yield from _sizes(tensors, file_size)


def _types(tensors: Tensors) -> Iterator[str]:
    for name, one in tensors.items():
        if _TABLE.fullmatch(name):
            continue
        is_vector = len(one.shape) < 2 or _VECTOR.fullmatch(name) is not None
        if is_vector and one.kind != _F32:
            yield f"{_shown(one)} is of type {_type(one)}, and must be F32"
        elif one.kind in _NO_WEIGHTS:
            yield f"{_shown(one)} is of type {_type(one)}, which no weights are of"


def _sizes(tensors: Tensors, file_size: int) -> Iterator[str]:
    for one in tensors.values():
        if not all(one.shape):
            yield f"{_shown(one)} is empty"
        if math.prod(one.shape) > 8 * file_size:  # no type has less than a bit for a weight
            yield f"{_shown(one)} would be larger than the file"


_LOW, _HIGH = b".lora_a", b".lora_b"


def adapter_problems(tensors: Tensors, file_size: int) -> Iterator[str]:
    """Find what is wrong with the tensors of a LoRA adapter."""
    yield from model_problems(tensors, file_size)
    for name, low in tensors.items():
        high = tensors.get(name.removesuffix(_LOW) + _HIGH) if name.endswith(_LOW) else None
        if high is None:
            continue  # llama.cpp refuses it
        if min(len(low.shape), len(high.shape)) < 2:
            yield f"{_shown(low)} or {_shown(high)} is no matrix"
        elif low.shape[2:] != high.shape[2:] or low.shape[1] != high.shape[0]:
            yield f"{_shown(low)} and {_shown(high)} do not go together"


# -- projectors

#: In encoders of sound, the keys may be without a bias.
_ATTENTION = re.compile(rb"([\w.]+\.attn_)[qkv](\.weight)|(v\.[\w.]+\.attn_)[qkv](\.bias)")

#: The types of projectors whose images are cut into patches by one convolution,
_PATCHED = frozenset({
    "mlp", "ldp", "ldpv2", "adapter", "idefics3", "gemma3", "lfm2", "janus_pro", "phi4", "pixtral",
    "lightonocr", "internvl", "kimivl", "paddleocr", "cogvlm", "qwen2vl_merger",
    "qwen2.5vl_merger", "qwen2.5o", "qwen3vl_merger",
})  # fmt: skip
#: those whose layers are plain: what they take and give is as wide as the encoder,
_PLAIN = frozenset({"mlp", "idefics3", "gemma3", "qwen2vl_merger", "ultravox", "voxtral", "qwen3a"})
#: and those of sound that have a table of positions.
_PLACED = frozenset({"ultravox", "voxtral", "qwen2a", "glma", "meralion", "qwen3a"})


def projector_problems(
    tensors: Tensors, kinds: Collection[str], widths: Mapping[str, int], file_size: int
) -> Iterator[str]:
    """Find what is wrong with the tensors of projectors.

    Args:
        tensors: of the file.
        kinds: the types of the projectors in it.
        widths: the widths of the encoders, "v" of images and "a" of sound.
        file_size: in bytes.
    """
    yield from model_problems(tensors, file_size)
    yield from _attention(tensors)
    yield from _biases(tensors)
    if _PATCHED.intersection(kinds):
        yield from _patches(tensors, widths.get("v", 0))
    if _PLACED.intersection(kinds) and b"a.position_embd.weight" not in tensors:
        yield "it has no tensor a.position_embd.weight"
    if _PLAIN.issuperset(kinds):
        for part, width in widths.items():
            yield from _layers(tensors, part.encode(), width)


def _attention(tensors: Tensors) -> Iterator[str]:
    for match in filter(None, map(_ATTENTION.fullmatch, tensors)):
        before, after = filter(None, match.groups())
        for other in (before + letter + after for letter in (b"q", b"k", b"v")):
            if other not in tensors:
                yield f"it has the tensor {match[0].decode()}, but no {other.decode()}"


def _biases(tensors: Tensors) -> Iterator[str]:
    """A bias is as long as what it is added to, which is a size of the weight before it."""
    for name, weight in tensors.items():
        bias = tensors.get(name.removesuffix(b".weight") + b".bias")
        if bias is not None and math.prod(bias.shape) not in weight.shape:
            yield f"{_shown(bias)} does not go with {_shown(weight)}"
        if len(weight.shape) > 2 and name.startswith((b"v.", b"a.")) and weight.kind not in _FLOATS:
            yield f"{_shown(weight)} is of type {_type(weight)}, and must be F32 or F16"


def _patches(tensors: Tensors, width: int) -> Iterator[str]:
    names = (b"v.patch_embd.weight", b"v.patch_embd.weight.1")
    found = [tensors[name] for name in names if name in tensors]
    if b"v.patch_embd.weight" not in tensors:
        yield "it has no tensor v.patch_embd.weight"
    for one in found:
        if len(one.shape) != 4 or one.shape[2] != 3 or (width and one.shape[3] != width):
            yield f"{_shown(one)} cuts no patches of three colors to a width of {width}"
        if one.shape != found[0].shape:
            yield f"{_shown(one)} is no counterpart of {_shown(found[0])}"


_LAYER = re.compile(rb"\w\.blk\.\d+\.(\w+)\.weight")
#: Whether the inputs, the outputs or both are as wide as the encoder.
_WIDE = {
    b"attn_q": (True, True), b"attn_k": (True, True), b"attn_v": (True, True),
    b"attn_out": (True, True), b"ffn_up": (True, False), b"ffn_down": (False, True),
}  # fmt: skip


def _layers(tensors: Tensors, part: bytes, width: int) -> Iterator[str]:
    for name, one in tensors.items():
        match = _LAYER.fullmatch(name) if name.startswith(part + b".") else None
        if match is None:
            continue
        if match[1] in (b"ln1", b"ln2"):
            if one.shape != (width,):
                yield f"{_shown(one)} is not {width} wide"
        elif (is_wide := _WIDE.get(match[1])) is not None:
            pairs = zip(is_wide, one.shape, strict=False)
            if len(one.shape) != 2 or any(wide and size != width for wide, size in pairs):
                yield f"{_shown(one)} does not fit a width of {width}"


def _shown(one: Tensor) -> str:
    shape = " x ".join(map(str, one.shape))
    return f"the tensor {one.name.decode(errors='replace'):.80} ({shape or 'no size'})"


def _type(one: Tensor) -> str:
    return _NAMES.get(one.kind, f"{one.kind} of ggml")
