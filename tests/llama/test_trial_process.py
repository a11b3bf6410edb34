"""Files that end llama.cpp: a process that may die tries them first."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import attrs
import pytest
import structlog

from tests.support import media_models
from tests.support.damaged_files import deadly_adapter, deadly_model, deadly_projector
from tests.support.file_trials import run
from tests.support.lora_files import make_lora
from tests.support.waiting import PATIENCE
from trioserve import Config, Server, llama
from trioserve.children.child import Child
from trioserve.errors import ModelLoadError
from trioserve.llama import estimate, trial_process
from trioserve.llama.trial_process import measure
from trioserve.models import BUNDLED, tried

pytestmark = [pytest.mark.system, pytest.mark.new_files]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tried, "_here", set())


def config(model: Path | None = None, **settings: object) -> Config:
    path = None if model is None else str(model)
    return Config(model=path, threads=1, ctx_size=256, parallel=1, **settings)


def test_a_deadly_model(tmp_path: Path) -> None:
    path = deadly_model(tmp_path / "bad.gguf")
    with pytest.raises(ModelLoadError) as caught:
        llama.load(config(path))
    assert caught.value.message.startswith(
        f"The model file {path} cannot be used: llama.cpp ends the process that loads it "
        "(SIGABRT, ggml.c:"
    )
    assert "GGML_ASSERT" in caught.value.message
    with pytest.raises(ModelLoadError) as again:
        measure(config(path))
    assert again.value.message == caught.value.message


def test_a_deadly_adapter_and_a_deadly_projector(tmp_path: Path) -> None:
    good, bad = make_lora(tmp_path / "good.gguf"), deadly_adapter(tmp_path / "bad.gguf")
    with pytest.raises(ModelLoadError, match=f"The LoRA adapter {bad} cannot be used: llama.cpp"):
        llama.load(config(lora=(str(good), str(bad)), mmproj_auto=False))
    pair = media_models.write_pair(tmp_path, "qwen3a")
    bad = deadly_projector(tmp_path / "bad-mmproj.gguf")
    with pytest.raises(ModelLoadError, match=f"The projector {bad} cannot be used: llama.cpp ends"):
        llama.load(config(pair.model, mmproj=str(bad)))


def test_a_file_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))
    shares: list[float] = []

    def progress(share: float) -> bool:
        shares.append(share)
        return True

    llama.load(config(model), progress=progress).close()
    assert shares == sorted(shares)
    assert 0.5 in shares and shares[-1] == 1.0
    monkeypatch.setattr(trial_process, "run", lambda *_: pytest.fail("it was tried again"))
    llama.load(config(model)).close()


def test_a_file_that_is_replaced_during_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))

    def run(*_: object) -> bool:
        deadly_model(tmp_path / "bad.gguf").replace(model)
        return True

    monkeypatch.setattr(trial_process, "run", run)
    monkeypatch.setattr(llama, "load_here", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ModelLoadError, match="replaced while it was tried"):
        llama.load(config(model))


def test_what_is_refused_there_is_refused_here(tmp_path: Path) -> None:
    model = Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))
    data = model.read_bytes()
    model.write_bytes(data[: len(data) // 2])
    for ask in (trial_process.run, measure):
        with pytest.raises(ModelLoadError, match=f"The model file {model} is cut short at "):
            ask(config(model))


def test_an_estimate_of_new_files_is_that_of_known_ones(tmp_path: Path) -> None:
    model = Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))
    assert measure(config(model)) == estimate.measure(config(model))


def test_a_load_that_is_cancelled_ends_the_process(tmp_path: Path) -> None:
    model = Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))
    with pytest.raises(ModelLoadError, match="was cancelled"):
        trial_process.run(config(model), lambda share: False)


def test_the_process_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "geheim")
    monkeypatch.setenv("HF_TOKEN", "geheim")
    full = attrs.evolve(config(), api_keys=("geheim",), api_key_weights=(2.0,), hf_token="geheim")
    assert "geheim" not in repr(trial_process._without_secrets(full))
    assert b"geheim" not in pickle.dumps(trial_process._without_secrets(full))
    assert "geheim" not in trial_process._environment().values()
    assert trial_process.run(full)


def test_without_a_process_it_is_loaded_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))
    for python in (tmp_path / "none", shutil.which("false")):
        monkeypatch.setattr(sys, "executable", str(python))
        with structlog.testing.capture_logs() as lines:
            assert not trial_process.run(config(model))
            assert measure(config(model)).weights
        assert [line["event"] for line in lines].count("the files are not tried first") == 2


def test_a_process_that_says_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(trial_process, "_PATIENCE", 0.2)
    with pytest.raises(ModelLoadError, match="or because it took too long"):
        trial_process.run(config())


class Endless:
    """An order that takes long to read."""

    def __reduce__(self) -> object:
        return time.sleep, (1000,)


def test_it_ends_with_its_server_while_it_works() -> None:
    command = [sys.executable, "-m", "trioserve.llama.trial_process"]
    with Child.spawn(command) as child:
        child.send(pickle.dumps(Endless()))
        assert child.end(patience=PATIENCE) == 1


async def test_a_server_that_wakes_to_a_bad_file_lives_on(tmp_path: Path) -> None:
    model = Path(shutil.copy(BUNDLED, tmp_path / "model.gguf"))
    async with Server(config(model)) as server:
        before = (await server.complete("Once", temperature=0.0, max_tokens=4)).text
        await server.sleep()
        deadly_model(model)
        with pytest.raises(ModelLoadError, match=r"llama\.cpp ends the process that loads"):
            await server.complete("Once", temperature=0.0, max_tokens=4)
        shutil.copy(BUNDLED, model)
        assert (await server.complete("Once", temperature=0.0, max_tokens=4)).text == before


def test_the_last_line_names_the_file(tmp_path: Path) -> None:
    path = deadly_model(tmp_path / "bad.gguf")
    command = [sys.executable, "-m", "trioserve", "--port", "0", "-t", "1", "-c", "256"]
    done = subprocess.run(
        [*command, "--no-trial-load", "--model", str(path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    *_, why, last = done.stderr.strip().splitlines()
    assert done.returncode == -6
    assert "GGML_ASSERT" in why
    assert last == (
        "trioserve: a fault in native code ends this process; it was at work with the model file "
        f"{path}"
    )


def test_no_damaged_file_ends_a_server(tmp_path: Path) -> None:
    """A sample; `make test-hostile` has all."""
    found = run(tmp_path, "model:0:40", "adapter:0:12", "projector:0:28")
    tally = Counter(one["outcome"] for one in found)
    assert len(found) == 80
    assert not tally["died in service"], found
    assert tally["died in the trial"] >= 8 and tally["refused by llama.cpp"] >= 20
    assert tally["loads and answers"] >= 8
