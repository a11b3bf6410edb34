"""Drafts by a head where a request is cancelled, preempted, shifted, saved, or out of the ordinary.

The output is that of a server without drafts, and the head has read what the model has: the engine
of these tests looks at both after each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support import media_models
from tests.support.drafted import Drafted, Settings, kinds, plain, without_head, write_head
from tests.support.engine_events import preempt
from tests.support.grammar_bench import schema
from tests.support.llama_bench import Bench
from tests.support.lora_files import make_lora
from tests.support.served_model import served_model
from tests.support.waiting import until
from trioserve.llama.backend import LlamaBackend
from trioserve.types import CacheRoot, GenerationParams, Prompt, SamplingParams, Task

GREEDY = SamplingParams(temperature=0.0)
STORY, OTHER = "Once upon a time there was a red ball", "One two three four five six seven"

Start = Callable[..., Drafted]


@pytest.fixture(
    scope="module", params=kinds("glm4moe", "step35", "gemma4", "qwen35", "eagle3", "dspark")
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return write_head(tmp_path_factory.mktemp("heads"), request.param, is_good=True)


@pytest.fixture
def start(model: Settings) -> Iterator[Start]:
    """Make engines with drafts, which are closed at the end."""
    made: list[Drafted] = []

    def make(settings: Settings = model, **more: Any) -> Drafted:
        made.append(Drafted(settings, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.backend.close()


def run_for(bench: Bench, n: int, task_id: int) -> None:
    """Step until a task has said so much."""
    while len(bench.tokens[task_id]) < n:
        assert bench.step()


def run_to_end(bench: Bench, task_id: int) -> None:
    """Step until a task has ended, which may wait for another thread."""
    while task_id not in bench.finished:
        bench.step()


def test_cancel(start: Start, model: Settings) -> None:
    bench = start()
    bench.submit(1, STORY, 200)
    bench.submit(2, OTHER, 50)
    run_for(bench, 10, 1)
    bench.engine.cancel(1)
    bench.run()
    bench.submit(3, STORY, 50)  # in what the first one has left
    bench.run()
    assert [bench.tokens[2], bench.tokens[3]] == plain(model, [OTHER, STORY], 50)
    assert bool(bench.finished[3].timings.cache_n) == bench.backend.can_cut
    assert bench.finished[3].timings.draft_n_accepted


def test_cancel_in_prefill(start: Start, model: Settings) -> None:
    bench = start(batch_size=128, ubatch_size=128)
    prompt = [300 + i * i % 97 for i in range(400)]
    bench.submit(1, OTHER, 60)
    run_for(bench, 5, 1)
    bench.submit(2, prompt, 50)
    slots = bench.engine._scheduler.slots
    while not any(slot.n_held > 40 and not slot.in_decode for slot in slots if slot.request):
        assert bench.step()
    assert not bench.tokens[2]
    bench.engine.cancel(2)
    bench.submit(3, prompt, 50)  # continues the cached text
    bench.run()
    other, same = plain(model, [OTHER, prompt], 60)
    assert (bench.tokens[1], bench.tokens[3]) == (other, same[:50])
    assert 0 < bench.finished[3].timings.cache_n < len(prompt) - 1
    assert bench.finished[1].timings.draft_n_accepted
    assert bench.finished[3].timings.draft_n


def test_a_text_from_ram_has_drafts(start: Start, model: Settings) -> None:
    bench = start(cache_ram=2**26, parallel=1, cache_seqs=0)
    prompt = bench.backend.vocab.tokenize(STORY)
    bench.submit(1, STORY, 60)
    bench.run()
    bench.submit(2, OTHER, 20)  # takes the only sequence
    bench.run()
    keys = [*prompt, *bench.tokens[1], bench.tokens[1][-1]]
    bench.submit(3, keys, 60)
    bench.run()
    assert bench.engine.status().counters.ram_tokens == len(keys) - 2
    assert [bench.tokens[3]] == plain(model, [keys], 60)
    assert bench.finished[3].timings.draft_n_accepted


@pytest.mark.parametrize("cache_ram", [0, 2**26])
def test_preemption(start: Start, model: Settings, cache_ram: int) -> None:
    bench = start(cache_ram=cache_ram)
    bench.submit(1, STORY, 60)
    bench.submit(2, OTHER, 60)
    run_for(bench, 12, 1)
    scheduler = bench.engine._scheduler
    slot = next(slot for slot in scheduler.slots if slot.request and slot.request.task.id == 1)
    preempt(bench.engine, slot)
    bench.run()
    assert [bench.tokens[1], bench.tokens[2]] == plain(model, [STORY, OTHER], 60)
    assert bench.finished[1].timings.draft_n_accepted


def test_a_full_kv_cache(start: Start, model: Settings) -> None:
    bench = start(ctx_size=256, kv_unified=True)
    prompts = [f"{STORY} {i}" for i in (1, 2, 3)]  # after 0, two tokens are as good as equal
    for i, prompt in enumerate(prompts):
        bench.submit(i, prompt, 120)
    bench.run()
    alone = Bench(**without_head(model))
    for i, prompt in enumerate(prompts):  # what is computed again may round otherwise
        assert alone.alone(prompt, 120).is_said_by(bench.tokens[i])
    alone.backend.close()
    assert all(bench.finished[i].timings.draft_n_accepted for i in range(3))


def test_context_shift(start: Start, model: Settings) -> None:
    texts = []
    for uses in (True, False):
        bench = start(shifts=True, parallel=1, ctx_size=256)
        if not uses:
            bench.engine.drafts.use([])
        bench.submit(1, STORY, 300, sampling=SamplingParams(temperature=0.0, ignore_eos=True))
        bench.run()
        assert bench.finished[1].truncated
        assert bool(bench.finished[1].timings.draft_n_accepted) == uses
        texts.append(bench.tokens[1])
    assert texts[0] == texts[1]


def test_saving_and_restoring_a_slot(start: Start, model: Settings, tmp_path: Path) -> None:
    bench = start(parallel=1)
    bench.submit(1, STORY, 30)
    bench.run()
    backend, path = bench.backend, tmp_path / "state"
    assert isinstance(backend, LlamaBackend)
    saved = bench.engine.save_slot(0, "")
    backend.write_state(path, saved)
    other = start(parallel=1)
    read, _ = other.backend.read_state(path, ())
    assert read.keys == saved.keys
    assert len(read.state) < len(saved.state)  # files have the model's part alone
    other.engine.restore_slot(0, read)
    keys = [*saved.keys, 300]
    other.submit(1, keys, 60)
    other.run()
    (expected,) = plain(model, [keys], 60)
    assert other.tokens[1] == expected
    assert other.finished[1].timings.cache_n == len(saved.keys)
    assert other.finished[1].timings.draft_n_accepted


def test_a_text_from_disk_has_drafts(start: Start, model: Settings, tmp_path: Path) -> None:
    first = start(cache_ram=2**26, disk=tmp_path)
    prompt = first.backend.vocab.tokenize(STORY)
    first.submit(1, STORY, 60)
    run_to_end(first, 1)
    first.engine._close()
    keys = [*prompt, *first.tokens[1], first.tokens[1][-1]]
    other = start(cache_ram=2**26, disk=tmp_path)
    other.submit(1, keys, 60)
    run_to_end(other, 1)
    other.engine._close()
    assert [other.tokens[1]] == plain(model, [keys], 60)
    assert other.finished[1].timings.cache_n == len(keys) - 2  # the last token was never decoded
    assert other.finished[1].timings.draft_n_accepted


def test_adapters(start: Start, model: Settings, tmp_path: Path) -> None:
    path = Path(model["model"])
    arch = "llama" if path.stem.startswith("read") else path.stem
    lora = make_lora(tmp_path / "lora.gguf", arch=arch, model=path, strength=0.3)

    def run(bench: Bench) -> list[list[int]]:
        tokens = bench.backend.vocab.tokenize(STORY)
        for i, adapters in enumerate(((), ((0, 1.0),))):
            bench.tokens[i] = []
            params = GenerationParams(max_tokens=50, sampling=GREEDY)
            bench.engine.submit(Task(i, Prompt(tokens), params, root=CacheRoot(adapters)))
        bench.run()
        return [bench.tokens[0], bench.tokens[1]]

    bench = start(lora=(str(lora),))
    bench.engine.drafts.use([])
    expected = run(bench)
    assert expected[0] != expected[1]
    bench = start(lora=(str(lora),))
    assert run(bench) == expected
    assert any(end.timings.draft_n for end in bench.finished.values())


def test_a_grammar(start: Start, model: Settings) -> None:
    shape = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 9, "maxItems": 9}
    texts = []
    for uses in (True, False):
        bench = start()
        if not uses:
            bench.engine.drafts.use([])
        grammar = schema(shape)
        bench.submit(1, STORY, 200, constraint=bench.backend.compile(grammar), grammar=grammar)
        bench.submit(2, OTHER, 40)
        bench.run()
        text = b"".join(bench.backend.vocab.pieces[token] for token in bench.tokens[1])
        assert len(json.loads(text)) == 9
        texts.append((bench.tokens[1], bench.tokens[2]))
    assert texts[0] == texts[1]


def test_several_outputs_for_a_prompt(start: Start, model: Settings) -> None:
    prompt = " ".join([STORY] * 8)
    bench = start()
    for i in range(3):
        sampling = SamplingParams(temperature=0.9, seed=i)
        bench.submit(i, prompt, 40, sampling=sampling)
    bench.run()
    for i in range(3):
        sampling = SamplingParams(temperature=0.9, seed=i)
        assert [bench.tokens[i]] == plain(model, [prompt], 40, sampling=sampling)
    n_cached = sum(bench.finished[i].timings.cache_n > 0 for i in range(3))
    assert n_cached == (2 if bench.backend.can_cut else 0)
    assert all(bench.finished[i].timings.draft_n for i in range(3))


def test_an_image(start: Start, model: Settings, tmp_path: Path) -> None:
    if "spec_draft_model" not in model:  # llama.cpp ends the process: glm4moe sees only with M-RoPE
        model = write_head(tmp_path / "seeing", "deepseek2", is_good=True)
    projector = media_models.write_projector(tmp_path / "mmproj.gguf", "mlp")
    texts = []
    for uses in (True, False):
        bench = start(model, mmproj=str(projector))
        if not uses:
            bench.engine.drafts.use([])
        assert bench.backend.projector is not None
        parts = [STORY, media_models.random_image(), OTHER]
        prompt = bench.backend.projector.prepare(parts, add_special=True)
        bench.tokens[1] = []
        bench.engine.start_helpers()
        bench.engine.submit(Task(1, prompt, GenerationParams(max_tokens=60, sampling=GREEDY)))
        run_to_end(bench, 1)
        bench.engine._close()
        texts.append(bench.tokens[1])
        assert bool(bench.finished[1].timings.draft_n_accepted) == uses
    assert texts[0] == texts[1]


def test_sleep_and_wake(tmp_path: Path) -> None:
    model = write_head(tmp_path, "eagle3", is_good=True)
    body = {"prompt": STORY, "n_predict": 80, "temperature": 0, "ignore_eos": True}
    body |= {"cache_prompt": False, "return_tokens": True}
    settings = {name: one for name, one in model.items() if name != "model"}
    with served_model(Path(model["model"]), **settings, sleep_idle_seconds=0.2) as server:
        answers = [server.post("/completion", body)]
        trio.run(until, lambda: server.client.get("/props").json()["is_sleeping"])
        answers.append(server.post("/completion", body))
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert all(answer["timings"]["draft_n"] for answer in answers)
