"""What is wrong with the tensors of a file, by its header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import media_models, tiny_models
from tests.support.architectures import GENERATING
from tests.support.lora_files import make_lora
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR, gguf, tensors
from trioserve.models.gguf import Tensor
from trioserve.models.tensors import adapter_problems, model_problems, projector_problems

F32, F16, Q8_0, I8, I32, F64 = 0, 1, 8, 24, 26, 28
SIZE = 2**20


def found(*each: tuple[str, tuple[int, ...], int]) -> dict[bytes, Tensor]:
    return tensors.by_name(Tensor(name.encode(), shape, kind, 0) for name, shape, kind in each)


def read(path: Path) -> dict[bytes, Tensor]:
    with gguf.read(path) as header:
        return tensors.by_name(header.tensors())


@pytest.mark.parametrize(
    ("name", "shape", "kind", "problem"),
    [
        ("blk.0.attn_norm.weight", (32,), F16, "is of type F16, and must be F32"),
        ("blk.0.ssm_norm.weight", (64, 1), Q8_0, "is of type 8 of ggml, and must be F32"),
        ("blk.0.ffn_gate_exps.bias", (32, 4), F16, "must be F32"),
        ("blk.0.attn_q.weight", (32, 32), I8, "is of type I8, which no weights are of"),
        ("token_embd.weight", (32, 512), F64, "is of type F64, which no weights are of"),
        ("blk.0.attn_q.weight", (32, 0), F32, "is empty"),
        ("blk.0.attn_q.weight", (2**20, 2**20), F16, "would be larger than the file"),
    ],
)
def test_a_wrong_tensor_of_a_model(
    name: str, shape: tuple[int, ...], kind: int, problem: str
) -> None:
    (said,) = model_problems(found((name, shape, kind)), SIZE)
    assert said.startswith(f"the tensor {name} (") and said.endswith(problem)


def test_what_is_not_refused() -> None:
    fine = found(
        ("blk.0.attn_q.weight", (32, 32), Q8_0),
        ("blk.0.attn_k.weight", (32, 32), 99),  # a type that is newer than these rules
        ("blk.0.ffn_gate_tid2eid.weight", (4, 512), I32),
        ("output_norm.weight", (32,), F32),
    )
    assert not list(model_problems(fine, SIZE))


@pytest.mark.parametrize(
    ("low", "high", "problem"),
    [
        (((32, 4), F64), ((4, 32), F32), "is of type F64"),
        (((128,), F32), ((4, 32), F32), "is no matrix"),
        (((32, 4), F32), ((4, 32, 2), F32), "do not go together"),
        (((32, 4), F32), ((8, 32), F32), "do not go together"),
    ],
)
def test_a_wrong_pair_of_an_adapter(
    low: tuple[tuple[int, ...], int], high: tuple[tuple[int, ...], int], problem: str
) -> None:
    name = "blk.0.attn_q.weight"
    pair = found((f"{name}.lora_a", *low), (f"{name}.lora_b", *high))
    assert [said for said in adapter_problems(pair, SIZE) if problem in said]


def changed(kind: str, name: str, shape: tuple[int, ...] | None, path: Path) -> Iterator[str]:
    """Give a tensor of a projector another shape, or take it away."""
    every = read(media_models.write_projector(path, kind))
    if shape is None:
        del every[name.encode()]
    else:
        assert name.encode() in every
        every |= found((name, shape, F32))
    types = {"qwen2vl": "qwen2vl_merger"}
    return projector_problems(every, {types.get(kind, kind)}, {"v": 32, "a": 32}, SIZE)


@pytest.mark.parametrize(
    ("kind", "name", "shape", "problem"),
    [
        ("mlp", "v.patch_embd.weight", None, "has no tensor v.patch_embd.weight"),
        ("mlp", "v.patch_embd.weight", (16, 16, 3, 8), "cuts no patches"),
        ("qwen2vl", "v.patch_embd.weight.1", (14, 28, 3, 32), "is no counterpart"),
        ("gemma3", "v.blk.0.ffn_up.bias", (7,), "does not go with"),
        ("gemma3", "v.blk.0.ffn_down.weight", (64, 16), "does not fit a width of 32"),
        ("idefics3", "v.blk.1.ln1.weight", (16,), "is not 32 wide"),
        ("mlp", "v.blk.0.attn_q.weight", None, "no v.blk.0.attn_q.weight"),
        ("qwen3a", "a.position_embd.weight", None, "has no tensor a.position_embd.weight"),
        ("ultravox", "a.conv1d.1.bias", (7, 1), "does not go with"),
    ],
)
def test_a_wrong_tensor_of_a_projector(
    tmp_path: Path, kind: str, name: str, shape: tuple[int, ...] | None, problem: str
) -> None:
    said = list(changed(kind, name, shape, tmp_path / "x.gguf"))
    assert [one for one in said if problem in one], said


def test_sound_files_have_no_problem(tmp_path: Path) -> None:
    assert not list(model_problems(read(BUNDLED), BUNDLED.stat().st_size))
    lora = make_lora(tmp_path / "lora.gguf")
    assert not list(adapter_problems(read(lora), lora.stat().st_size))
    bundled = projector_problems(
        read(BUNDLED_PROJECTOR), {"mlp", "qwen3a"}, {}, BUNDLED_PROJECTOR.stat().st_size
    )
    assert not list(bundled)
    for name, architecture in GENERATING.items():
        path = tiny_models.write(tmp_path / f"{name}.gguf", architecture)
        assert not list(model_problems(read(path), path.stat().st_size)), name
