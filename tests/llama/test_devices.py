"""Options that say where llama.cpp keeps and computes things, and what a model's metadata are."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import devices
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.context import generation_params
from trioserve.llama.library import lib
from trioserve.llama.model import LlamaModel

YARN = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")


def test_the_cpu_is_a_device() -> None:
    found = devices.devices()
    assert any(one.is_cpu and one.name == "CPU" and one.description for one in found)


def test_versions() -> None:
    assert devices.versions().startswith("llama.cpp ")
    assert "(commit " in devices.versions()
    assert "CPU" in devices.system()


def test_metadata_are_replaced() -> None:
    config = Config(
        override_kv=(
            "llama.context_length=int:4096",
            "tokenizer.ggml.add_bos_token=bool:false",
            "general.name=str:mine, or not",
            "made.up=float:0.5",
        ),
    )
    with LlamaModel.load(config) as model:
        assert model.info.n_ctx_train == 4096
        assert model.info.add_bos is False
        assert model.metadata["general.name"] == "mine, or not"


def test_everything_can_be_kept_on_the_cpu() -> None:
    config = Config(
        device=("none",),
        cpu_moe=True,
        n_cpu_moe=1,
        n_cpu_ffn=1,
        override_tensor=("output=CPU",),
        tensor_split=(1.0,),
        repack=False,
        no_host=True,
        kv_offload=False,
        op_offload=False,
        load_mode="none",
        ctx_size=256,
    )
    with LlamaBackend.load(config) as backend:
        backend.batch.add(1, 0, 0, logits=True)
        backend.decode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": ("none", "CUDA0")}, "There is no device 'none' to offload to"),
        ({"device": ("CPU",)}, "There is no device 'CPU' to offload to"),
        ({"override_tensor": ("a=GPU",)}, "There is no buffer type 'GPU'; available: CPU"),
        ({"tensor_split": (1.0,) * 999}, "tensor_split has 999 shares; llama.cpp takes "),
    ],
)
def test_what_is_not_there_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        LlamaModel.load(Config(**fields))
    assert caught.value.message.startswith(message)


def test_positions_are_scaled() -> None:
    config = Config(
        rope_scaling="yarn",
        rope_freq_scale=0.5,
        rope_freq_base=5000.0,
        yarn_orig_ctx=512,
        yarn_ext_factor=1.0,
        yarn_attn_factor=0.5,
        yarn_beta_fast=30.0,
        yarn_beta_slow=2.0,
        swa_full=True,
        ctx_size=256,
    )
    with LlamaModel.load(config) as model:
        params = generation_params(model, config)
        given = lib.llama_context_default_params()
        for name in ("rope_freq_scale", "rope_freq_base", "yarn_orig_ctx", *YARN):
            assert getattr(params, name) == getattr(config, name) != getattr(given, name)
        assert generation_params(model, Config(ctx_size=256)).swa_full is False
        assert params.swa_full
        assert params.rope_scaling_type == 2


def test_the_defaults_are_those_of_llama_cpp() -> None:
    with LlamaModel.load(Config(ctx_size=256)) as model:
        params = generation_params(model, Config(ctx_size=256))
        given = lib.llama_context_default_params()
        for name in ("rope_scaling_type", "rope_freq_scale", "rope_freq_base", "yarn_orig_ctx"):
            assert getattr(params, name) == getattr(given, name), name
        for name in ("offload_kqv", "op_offload", *YARN):
            assert getattr(params, name) == getattr(given, name), name
    params = lib.llama_model_default_params()
    assert devices.place(params, Config()) == []
    given = lib.llama_model_default_params()
    for name in ("split_mode", "lazy_mode", "main_gpu", "use_extra_bufts", "no_host"):
        assert getattr(params, name) == getattr(given, name), name


def test_a_stretched_model_takes_longer_sequences() -> None:
    plain = Config(ctx_size=8192, parallel=1, cache_seqs=0)
    with LlamaBackend.load(plain) as backend:
        n_ctx_train = backend.info.n_ctx_train
        assert backend.n_ctx_seq == min(8192, n_ctx_train)
    longer = Config(ctx_size=2 * n_ctx_train, parallel=1, cache_seqs=0, rope_freq_scale=0.5)
    with LlamaBackend.load(longer) as backend:
        assert backend.n_ctx_seq == 2 * n_ctx_train


def test_the_slots_can_have_a_limit_each() -> None:
    with LlamaBackend.load(Config(parallel=2, kv_unified_per_slot=300)) as backend:
        assert backend.n_ctx == 768  # two times 300, in steps of 256
        assert backend.n_ctx_seq == 300


def test_the_first_of_several_names_is_the_model_s() -> None:
    with LlamaModel.load(Config(alias="one, two")) as model:
        assert model.info.name == "one"


# -- other machines


def device(handle: int, name: str) -> devices.Device:
    gpu, remote = name != "CPU", name.startswith("RPC")
    return devices.Device(handle, name, name, is_cpu=not gpu, is_gpu=gpu, remote=remote)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(rpc=("a:1", "b:1")), [3, 4, 2]),  # their layers first, then those of the GPU here
        (Config(rpc=("a:1", "b:1"), device=("CUDA0", "RPC1")), [2, 4]),
        (Config(rpc=("a:1", "b:1"), device=("none",)), []),
        (Config(), [2]),  # a draft model stays here
    ],
)
def test_what_goes_to_other_machines(
    monkeypatch: pytest.MonkeyPatch, config: Config, expected: list[int]
) -> None:
    known = [device(i, name) for i, name in enumerate(("CPU", "CUDA0", "RPC0", "RPC1"), 1)]
    monkeypatch.setattr(devices, "devices", lambda: tuple(known))
    params = lib.llama_model_default_params()
    kept = devices.place(params, config)
    assert list(kept[0]) == [*expected, None]


def test_a_model_is_not_loaded_without_the_other_machines() -> None:
    with pytest.raises(ModelLoadError, match="rpc: no other machine is connected"):
        LlamaModel.load(Config(rpc=("10.0.0.1:50052",)))
