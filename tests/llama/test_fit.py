"""Choices so that a model fits: arithmetic on the header of its file."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import attrs
import pytest

from tests.support import gguf_models, tiny_models
from tests.support.architectures import GENERATING, QWEN2VL
from tests.support.command import serving
from tests.support.lora_files import make_lora
from tests.support.speech_models import write_pocket
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import fit as module, room as rooms
from trioserve.llama.estimate import measure
from trioserve.llama.fit import Fit, Models, Room, fit, layout_of, need, summary
from trioserve.llama.layout import MAX_SNAPSHOTS
from trioserve.llama.shape import Layer, Shape, read_shape
from trioserve.llama.speech.speaker import size_of
from trioserve.models import BUNDLED
from trioserve.models.speech import SpeechFiles

MIB, GIB = 2**20, 2**30


def shape(
    layers: int,
    n_embd: int,
    n_ff: int,
    kv: int,
    *,
    n_vocab: int = 128_000,
    n_ctx: int = 131_072,
    bits: float = 4.5,
    experts: int = 0,
    window: int = 0,
    every: int = 1,
    state: int = 0,
) -> Shape:
    """Make the shape of a model; `kv` are the values of the keys in a cell of a layer.

    One layer in each group sees all of the text, the others a window or their state.
    """
    attention, wide = n_embd * (2 * n_embd + 2 * kv), 3 * n_embd * n_ff
    of_experts = int(experts * wide * bits / 8)
    made = []
    for i in range(layers):
        is_full = i % every == every - 1
        made.append(
            Layer(
                weights=int(attention * bits / 8) + (of_experts or int(wide * bits / 8)),
                experts=of_experts,
                dense=0 if experts else int(wide * bits / 8),
                key=kv if is_full or window else 0,
                value=kv if is_full or window else 0,
                is_windowed=bool(window) and not is_full,
                state=0 if is_full or window else state,
            )
        )
    return Shape(
        arch="qwen35" if state else "llama",
        n_ctx_train=n_ctx,
        n_vocab=n_vocab,
        n_embd=n_embd,
        n_heads=n_embd // 128,
        activations=2 * n_ff + 7 * n_embd,
        window=window,
        layers=tuple(made),
        embedding=int(n_vocab * n_embd * bits / 8),
        output=int(n_vocab * n_embd * bits / 8),
        is_tied=False,
    )


#: Sizes of models that there are, at about four bits.
SHAPES = {
    "llama-1b": shape(16, 2048, 8192, 512),
    "llama-8b": shape(32, 4096, 14336, 1024),
    "llama-70b": shape(80, 8192, 28672, 1024),
    "qwen3-0.6b": shape(28, 1024, 3072, 1024, n_vocab=152_000, n_ctx=40_960),
    "qwen3-30b-a3b": shape(48, 2048, 768, 512, n_vocab=152_000, n_ctx=262_144, experts=128),
    "qwen3-235b-a22b": shape(94, 4096, 1536, 512, n_vocab=152_000, n_ctx=262_144, experts=128),
    "qwen3-next-80b": shape(48, 2048, 512, 512, experts=512, every=4, state=2_200_000),
    "gpt-oss-120b": shape(36, 2880, 2880, 512, experts=128, window=128, every=2, n_vocab=201_000),
    "gemma3-27b": shape(62, 5376, 21504, 2048, n_vocab=262_000, window=1024, every=6),
    "mixtral-8x7b": shape(32, 4096, 14336, 1024, n_vocab=32_000, n_ctx=32_768, experts=8),
    "granite-hybrid-7b": shape(40, 1536, 512, 512, experts=64, every=10, state=800_000),
    "mamba2-3b": shape(64, 2560, 2560, 0, every=65, state=2_700_000, n_ctx=1_048_576),
}
GPUS = [(), (4,), (8,), (24,), (80,), (8, 8), (24, 8), (24, 24, 24), (80, 80, 80, 80)]
RAM = (8, 16, 32, 128)


def room(ram: float, gpus: tuple[float, ...] = (), **fields: bool) -> Room:
    return Room(
        ram=int(ram * GIB),
        gpus=tuple(int(one * GIB) for one in gpus),
        total_ram=int(ram * GIB),
        **fields,
    )


def fits(models: Models, config: Config, there: Room, *, may_drop: bool = False) -> bool:
    return module._fits(need(models, config, there), config, there, may_drop=may_drop)


def test_states_to_go_back_to_count() -> None:
    config, models = Config(parallel=2, cache_seqs=0), Models(model=SHAPES["mamba2-3b"])
    plain = need(models, config, room(32))
    drafted = need(models, attrs.evolve(config, spec_type=("ngram-mod",)), room(32))
    assert drafted.cache - plain.cache == MAX_SNAPSHOTS * 2 * 64 * 2_700_000


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_chosen_fits_and_no_longer_context_would(name: str) -> None:
    """On 0 to 4 GPUs of 4 to 80 GB, with 8 to 128 GB of RAM."""
    models = Models(model=SHAPES[name])
    n_fitted = 0
    for ram, gpus in [*product(RAM, GPUS)][::4]:  # all GPUs, each with one of the RAM sizes
        there, config = room(ram, gpus), Config()
        try:
            found = fit(models, config, there)
        except ModelLoadError:
            assert models.model.weights > there.ram * 0.6, (ram, gpus)
            continue
        n_fitted += 1
        assert fits(models, found.config, there), (ram, gpus)
        if fits(models, config, there):
            assert found.config == config and not found.changes, "nothing is made smaller"
            continue
        assert found.changes and found.need.n_ctx >= config.fit_ctx
        if found.config.ctx_size:
            longer = attrs.evolve(found.config, ctx_size=found.config.ctx_size + 256)
            assert not fits(models, longer, there), (ram, gpus, found.changes)
    assert n_fitted


@pytest.mark.parametrize(
    ("name", "ram", "gpus", "chosen"),
    [
        ("llama-8b", 64, (), {}),
        ("llama-8b", 64, (80,), {}),
        ("llama-8b", 16, (), {"ctx_size"}),
        ("llama-8b", 64, (12,), {"ctx_size"}),
        ("llama-8b", 64, (4,), {"ctx_size", "n_gpu_layers"}),
        ("qwen3-30b-a3b", 64, (12,), {"ctx_size", "n_cpu_moe"}),
        ("gpt-oss-120b", 128, (24,), {"n_cpu_moe"}),
        ("llama-70b", 64, (24, 24), {"ctx_size"}),
    ],
)
def test_what_costs_least_is_given_up_first(
    name: str, ram: int, gpus: tuple[int, ...], chosen: set[str]
) -> None:
    config = Config()
    found = fit(Models(model=SHAPES[name]), config, room(ram, gpus)).config
    changed = {
        field.name
        for field in attrs.fields(Config)
        if getattr(config, field.name) != getattr(found, field.name)
    }
    assert changed - {"tensor_split"} >= set(chosen), changed
    assert changed <= {*chosen, "ctx_size", "tensor_split"}, changed


@pytest.mark.parametrize(
    "fields",
    [
        {"ctx_size": 32768},
        {"n_gpu_layers": -2},
        {"n_gpu_layers": 20},
        {"ubatch_size": 1024},
        {"cache_type_k": "q4_0"},
        {"cpu_moe": True},
        {"n_cpu_moe": 3},
        {"tensor_split": (3.0, 1.0)},
        {"kv_unified_per_slot": 4096},
    ],
)
@pytest.mark.parametrize("name", ["llama-8b", "qwen3-30b-a3b"])
def test_what_the_user_set_is_kept(name: str, fields: dict[str, object]) -> None:
    config = Config(**fields)
    for ram, gpus in product((8, 32), [(), (12, 4)]):
        try:
            found = fit(Models(model=SHAPES[name]), config, room(ram, gpus)).config
        except ModelLoadError:
            continue
        assert all(getattr(found, name) == value for name, value in fields.items())
        if "cache_type_k" in fields:
            assert found.cache_type_v == config.cache_type_v


def test_the_last_resorts_are_smaller_batches_and_then_a_smaller_type() -> None:
    models = Models(model=SHAPES["llama-8b"])
    chosen = []
    for mib in range(5900, 4000, -25):
        try:
            found = fit(models, Config(), room(mib / 1024)).config
        except ModelLoadError:
            break
        chosen.append((found.ctx_size or 131_072, found.ubatch_size, found.cache_type_k))
    order = [*dict.fromkeys(one[1:] for one in chosen)]
    assert order == [(512, "f16"), (256, "f16"), (128, "f16"), (64, "f16"), (512, "q8_0"),
                     (256, "q8_0"), (128, "q8_0"), (64, "q8_0")]  # fmt: skip
    assert chosen[-1][0] >= 4096


def test_what_is_impossible_is_refused_with_the_nearest_that_fits() -> None:
    models = Models(model=SHAPES["llama-8b"])
    config = Config(ctx_size=128_000)
    with pytest.raises(ModelLoadError, match=r"--ctx-size \d+ would fit") as caught:
        fit(models, config, room(12))
    nearest = int(caught.value.message.split("--ctx-size ")[1].split()[0])
    assert fit(models, attrs.evolve(config, ctx_size=nearest), room(12)).need.n_ctx == nearest
    with pytest.raises(ModelLoadError):
        fit(models, attrs.evolve(config, ctx_size=nearest + 256), room(12))
    with pytest.raises(ModelLoadError, match="take a file with a smaller quantization"):
        fit(models, config, room(4))
    with pytest.raises(ModelLoadError, match=r"on GPU 0, where 3.0 GiB are free"):
        fit(models, Config(n_gpu_layers=-2), room(64, (4,)))


def test_mapped_weights_that_do_not_fit_are_the_very_last_resort() -> None:
    models = Models(model=SHAPES["llama-8b"], is_mapped=True)
    found = fit(models, Config(), room(4))
    assert found.is_tight and found.need.n_ctx == 4096
    assert not fit(models, Config(), room(16)).is_tight
    with pytest.raises(ModelLoadError):
        fit(models, Config(), room(0.25))


def test_a_limit_of_what_is_written_to_leaves_room_for_a_mapped_file() -> None:
    models = Models(model=SHAPES["llama-8b"], is_mapped=True)
    limited = Room(ram=32 * GIB, data=2 * GIB, is_lazy=True)
    found = fit(models, Config(), limited)
    assert not found.is_tight and 4096 < found.need.n_ctx < SHAPES["llama-8b"].n_ctx_train
    assert found.need.ram - found.need.mapped + found.left < 2 * GIB < found.need.mapped
    with pytest.raises(ModelLoadError, match=r"where 2.0 GiB are free"):
        fit(attrs.evolve(models, is_mapped=False), Config(), limited)


def test_devices_get_what_they_have_room_for() -> None:
    """By default the shares follow the free memory; a small device could not hold its share."""
    models, there = Models(model=SHAPES["llama-70b"]), room(64, (30, 22))
    found = fit(models, Config(), there)
    assert fits(models, found.config, there)
    assert len(found.need.gpus) == 2 and all(found.need.gpus)
    targets = attrs.evolve(found.config, fit_target=(8192, 1024))
    assert module._limits(targets, there) == [22 * GIB, 21 * GIB]


def test_a_draft_model_and_other_files_count() -> None:
    models = Models(model=SHAPES["llama-8b"])
    both = Models(model=SHAPES["llama-8b"], draft=SHAPES["llama-1b"], others=GIB)
    config = Config(ctx_size=8192, spec_draft_model="draft.gguf")
    alone, together = (need(one, config, room(64)) for one in (models, both))
    assert together.weights == alone.weights + SHAPES["llama-1b"].weights + GIB
    assert together.cache > alone.cache and together.process > alone.process


def test_the_line_that_says_what_was_chosen() -> None:
    found = fit(Models(model=SHAPES["llama-8b"]), Config(), room(16, (4,)))
    line = summary(found)
    assert f"a context of {found.need.n_ctx} tokens" in line and "of 4.0 GiB on GPU 0" in line
    assert "--n-gpu-layers" in line and "to fit the memory" in line
    assert "nothing had to be made smaller" in summary(
        fit(Models(model=SHAPES["llama-1b"]), Config(), room(64))
    )


# -- the arithmetic beside llama.cpp's

FILES = [*GENERATING, "qwen2vl"]


@pytest.fixture(scope="module", params=[*FILES, "bundled", "bert"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "bundled":
        return BUNDLED
    if request.param == "bert":
        return gguf_models.write_bert(folder / "bert.gguf").path
    known = {**GENERATING, "qwen2vl": QWEN2VL}
    return tiny_models.write(folder / f"{request.param}.gguf", known[request.param])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_unified": True},
        {"kv_unified": False, "ctx_size": 2048, "ubatch_size": 128},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "parallel": 1},
    ],
)
def test_the_header_says_what_llama_cpp_will_allocate(
    file: Path, fields: dict[str, object]
) -> None:
    if "cache_type_k" in fields and file.stem != "bundled":
        pytest.skip("its heads are too small for this type")
    if file.stem == "bert":
        fields = {"embeddings": True, **fields}
    config = Config(model=str(file), threads=1, mmproj_auto=False, **fields)
    real, found = measure(config), rooms.plan(attrs.evolve(config, fit="off"))
    assert found is not None and not found.changes
    layout = layout_of(read_shape(file) or SHAPES["llama-1b"], config, found.room)
    assert real.n_ctx == found.need.n_ctx == layout.n_ctx
    assert found.need.weights + found.need.mapped == pytest.approx(real.weights, rel=0.01)
    assert found.need.compute == pytest.approx(real.compute, rel=0.15, abs=MIB)
    if not layout.is_elastic:  # there llama.cpp counts addresses, and copies
        assert found.need.cache == pytest.approx(real.cache, rel=0.02, abs=MIB)


def test_the_context_of_embeddings_may_be_given_for_each_slot() -> None:
    config = Config(embeddings=True, parallel=2, kv_unified_per_slot=512, mmproj_auto=False)
    found = rooms.plan(attrs.evolve(config, fit="off"))
    assert found is not None
    assert measure(config).n_ctx == found.need.n_ctx == 1024


def test_files_beside_the_model_are_counted(tmp_path: Path) -> None:
    adapter = make_lora(tmp_path / "a.gguf")
    alone, both = (
        rooms.plan(Config(mmproj_auto=False, lora=lora)) for lora in ((), (str(adapter),))
    )
    assert alone is not None and both is not None
    assert both.need.ram - alone.need.ram == adapter.stat().st_size


def test_a_header_that_cannot_be_read_is_left_to_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(BUNDLED.read_bytes()[:1000])
    assert rooms.plan(Config(model=str(path))) is None


def test_what_is_left_over_limits_the_prompts_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "free_memory", lambda **_: 512 * MIB)
    found = rooms.plan(Config())
    assert isinstance(found, Fit)
    spare = rooms.spare_ram(Config(), found)
    assert spare is not None and spare == found.left // 2 < 2048 * MIB
    assert rooms.spare_ram(Config(cache_ram=100), found) is None


# -- the arithmetic beside a real process


def anonymous(pid: int) -> int:
    """Bytes of a process that are no file's: how busy the machine is does not change them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return int(dict(line.split(":", 1) for line in lines)["Anonymous"].split()[0]) * 1024


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["bundled", "qwen3", "gemma3", "mamba2", "deepseek2"])
async def test_a_full_server_takes_what_was_estimated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [one for one in os.environ if one.startswith("COVERAGE")]:
        monkeypatch.delenv(variable)  # measuring coverage takes memory
    path = BUNDLED if name == "bundled" else tiny_models.write_generating(tmp_path, name)
    flags = ("-m", str(path), "--load-mode", "none", "--no-mmproj-auto", "--cache-ram", "0")
    n_embd = 2048 if name == "bundled" else 0
    flags += ("--embd-ctx-size", str(n_embd))
    fields = {"load_mode": "none", "mmproj_auto": False, "embd_ctx_size": n_embd}
    found = rooms.plan(Config(model=str(path), **fields))
    assert found is not None and found.need.mapped == 0
    async with serving(*flags, timeout=600) as running, running.client() as client:
        prompt = [300 + i % 100 for i in range(found.need.n_ctx - 16)]
        answer = await client.post(
            "/completion", json={"prompt": prompt, "n_predict": 2}, timeout=300
        )
        assert answer.status_code == 200, answer.text
        if n_embd:
            text = " ".join(["word"] * (n_embd // 2))
            answer = await client.post("/v1/embeddings", json={"input": [text, text]})
            assert answer.status_code == 200, answer.text
        taken = anonymous(running.process.pid)
    assert taken == pytest.approx(found.need.ram, rel=0.05, abs=8 * MIB)


def test_a_model_that_speaks_takes_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = write_pocket(tmp_path)
    files = SpeechFiles(pair.model, pair.projector)
    others = {"tts": "none"}, pair.settings
    alone, speaks = (Config(mmproj_auto=False, **one) for one in others)
    size = size_of(files, speaks)
    first, second = rooms.plan(alone), rooms.plan(speaks)
    assert first is not None and second is not None
    assert second.need.weights - first.need.weights == size > 64 * 2**20
    monkeypatch.setattr(rooms, "_free_on_gpus", lambda config: (10 * size, 20 * size))
    found = rooms.plan(speaks)
    assert found is not None and found.room.gpus == (10 * size, 19 * size)
    assert found.need.weights <= first.need.weights
