"""Writes tiny models with heads for drafts, in the same file or in a separate one.

The guesses of a good head are right about half of the time; those of other heads are random. The
less the layers of a model add, the more its next token depends on the last one alone, as does the
guess of a good head.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.architectures import WIDTH, Architecture
from tests.support.gguf_models import Array
from tests.support.head_architectures import (
    ASSISTANT,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    MTP,
    READ,
    heads_of,
    without_heads,
)
from tests.support.tiny_models import write

Weights = dict[str, Array]

#: The mask token of models that guess blocks.
MASK = 400
BLOCKS = {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}
_FAINT = 0.03
_ONE = np.eye(WIDTH, dtype=np.float32)


def write_mtp(folder: Path, name: str, *, is_good: bool = False) -> Path:
    """Write a model with MTP heads, named as its architecture; returns the path."""
    return write(
        folder / f"{name}.gguf", MTP[name], change=lambda weights: _mtp(weights, is_good=is_good)
    )


def write_apart(folder: Path, name: str, *, is_good: bool = False) -> tuple[Path, Path]:
    """Write such a model, and its heads to a separate file; returns both paths."""

    def change(weights: Weights) -> None:
        _mtp(weights, is_good=is_good)

    model = write(folder / f"{name}.gguf", without_heads(MTP[name]), change=change)
    return model, write(folder / f"mtp-{name}.gguf", heads_of(MTP[name]), change=change)


def write_assistant(folder: Path, *, is_good: bool = False) -> tuple[Path, Path]:
    """Write a Gemma 4, and an assistant for it; returns their paths."""
    output: list[Array] = []

    def of_model(weights: Weights) -> None:
        output.append(weights["output.weight"])
        if is_good:
            _fade(weights, _FAINT)

    def change(weights: Weights) -> None:
        if is_good:  # it computes what the model does without its layers
            _fade(weights, _FAINT)
            nothing = np.zeros_like(_ONE)
            weights["token_embd.weight"] = np.hstack([output[0], 0 * output[0]])
            weights["nextn.pre_projection.weight"] = np.block(
                [[_ONE, nothing], [nothing, 0.1 * _ONE]]
            )

    model = write(folder / "gemma4.gguf", READ["gemma4"], change=of_model)
    return model, write(folder / "mtp-gemma4.gguf", ASSISTANT, change=change)


def write_read(folder: Path, name: str = "llama", *, repeats: bool = False) -> Path:
    """Write a model whose layers a head can read; returns the path.

    With `repeats`, it says its last token again and again.
    """

    def change(weights: Weights) -> None:
        if repeats:
            _fade(weights, 0.05)
            weights["token_embd.weight"][MASK] *= 1e-3
            weights["output.weight"] = weights["token_embd.weight"] * WIDTH**-0.5

    return write(folder / f"read-{name}.gguf", READ[name], change=change)


def write_eagle3(folder: Path, *, is_good: bool = False) -> tuple[Path, Path]:
    """Write a model and an EAGLE-3 head for it; returns their paths."""
    faint = _FAINT if is_good else 1.0

    def change(weights: Weights) -> None:
        _fade(weights, faint)
        if is_good:  # it sees the last token alone
            weights["fc.weight"] *= 0.05
            weights["blk.0.attn_output.weight"] = _ONE
            weights["blk.0.attn_v.weight"] = _joined(_ONE, 0 * _ONE)
            for part in "qk":
                weights[f"blk.0.attn_{part}.weight"] = _joined(4 * _ONE, 0 * _ONE)

    model = write(folder / "read.gguf", READ["llama"], change=lambda weights: _fade(weights, faint))
    return model, write(folder / "eagle3.gguf", EAGLE3, change=change)


def write_blocks(folder: Path, kind: str, *, is_good: bool = False) -> tuple[Path, Path]:
    """Write a model, and one that guesses blocks for it; returns their paths.

    A good one guesses that the model, which does so, says its last token again.
    """
    return write_read(folder, repeats=is_good), write_block(folder, BLOCKS[kind], is_good=is_good)


def write_block(
    folder: Path, architecture: Architecture, *, mask: int | None = MASK, is_good: bool = False
) -> Path:
    """Write a model that guesses blocks; returns the path."""

    def change(weights: Weights) -> None:
        if not is_good:
            return
        _fade(weights, 0.05)
        weights["fc.weight"] = _joined(_ONE, 0 * _ONE)
        for i in range(2):
            weights[f"blk.{i}.attn_v.weight"] = weights[f"blk.{i}.attn_output.weight"] = _ONE
            weights[f"blk.{i}.attn_q.weight"] *= 0.01
        for key in weights:
            if "markov" in key or "selector" in key or "conv_proj" in key:
                weights[key] *= 0.01
            elif "conv_base" in key:
                weights[key][:] = 0.0
                weights[key][:, 0] = 1.0

    return write(folder / "block.gguf", architecture, mask=mask, change=change)


def write_for(folder: Path, spec_type: str, name: str) -> tuple[Path, Path | None]:
    """Write a model of an architecture, and a head of this type for it if it has none."""
    if spec_type == "draft-mtp":
        return write_assistant(folder) if name == "gemma4" else (write_mtp(folder, name), None)
    model = write_read(folder, name)
    if spec_type != "draft-eagle3":
        kind = spec_type.removeprefix("draft-")
        return model, write_block(folder, BLOCKS[kind])
    return model, write(folder / "eagle3.gguf", EAGLE3)


def _mtp(weights: Weights, *, is_good: bool) -> None:
    if is_good:
        _fade(weights, _FAINT)
        for key in weights:
            if key.endswith("eh_proj.weight"):
                weights[key] = _joined(_ONE, 0.1 * _ONE)


def _joined(first: Array, second: Array) -> Array:
    return np.hstack([first, second])


#: Suffixes of the names of a layer's output weights.
_ADDED = (".attn_output.weight", ".ffn_down.weight", ".post_ffw_norm.weight", ".ssm_out.weight")


def _fade(weights: Weights, share: float) -> None:
    """Reduce what the layers add."""
    has_norms = any(key.endswith(_ADDED[2]) for key in weights)
    for key in weights:
        after = has_norms and key.endswith(".post_attention_norm.weight")
        if key.endswith(_ADDED) or "_down_" in key or after:
            weights[key] *= share
