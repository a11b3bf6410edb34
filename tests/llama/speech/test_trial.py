"""New files that speak are tried in another process, which they may end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.llama.speech.test_speaker import load
from tests.support.file_trials import run
from tests.support.speech_models import SpeechPair, write_pocket, write_qwen
from trioserve.errors import ModelLoadError
from trioserve.llama import trial_process
from trioserve.models import tried

pytestmark = [pytest.mark.system, pytest.mark.new_files]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tried, "_here", set())


def _set(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, NDArray[np.floating]]], None]:
    def change(tensors: dict[str, NDArray[np.floating]]) -> None:
        tensors[name] = np.resize(tensors[name], shape)

    return change


@pytest.mark.parametrize(
    ("write", "name", "shape"),
    [
        (write_pocket, "a.gen.emb_mean", (5,)),
        (write_pocket, "a.gen.flow.input_proj.weight", (16, 9)),
        (write_pocket, "a.seanet.conv_in.weight", (2, 3, 7)),
        (write_qwen, "a.gen.wav.dac.entry.weight", (16, 8, 7)),
        (write_qwen, "mm.a.fc.weight", (32, 95, 1)),
    ],
)
def test_a_projector_that_would_end_the_server_ends_that_process(
    tmp_path: Path, write: Callable[..., SpeechPair], name: str, shape: tuple[int, ...]
) -> None:
    """libmtmd takes the shapes of its tensors for granted."""
    pair = write(tmp_path, change_projector=_set(name, shape))
    with pytest.raises(
        ModelLoadError, match=r"llama\.cpp ends the process .*GGML_ASSERT"
    ) as caught:
        load(pair)
    assert str(pair.projector) in caught.value.message


def _not_finite(tensors: dict[str, NDArray[np.floating]]) -> None:
    tensors["a.gen.code.embd.weight"][3, 5] = np.nan


def _one_less(tensors: dict[str, NDArray[np.floating]]) -> None:
    tensors["a.gen.code.embd.weight"] = tensors["a.gen.code.embd.weight"][:, :-1]


@pytest.mark.parametrize(
    ("change", "kind", "problem"),
    [
        (_not_finite, "F32", "rows for codes that are not finite"),
        (_not_finite, "F16", "rows for codes that are not finite"),
        (_one_less, "F32", "lacks rows for some of its codes"),
    ],
)
def test_codes_that_would_end_the_server_later_are_found(
    tmp_path: Path, change: Callable[..., None], kind: str, problem: str
) -> None:
    """A code may be chosen for the first time after hours."""
    (sound := tmp_path / "sound").mkdir()
    quantized = {"a.gen.code.embd.weight": kind}
    with closing(load(write_qwen(sound, quantized=quantized))):
        pass
    with pytest.raises(ModelLoadError, match=problem):
        load(write_qwen(tmp_path, change_projector=change, quantized=quantized))


def test_files_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = write_pocket(tmp_path)
    with closing(load(pair)):
        pass
    monkeypatch.setattr(trial_process, "run", lambda *_: pytest.fail("they were tried again"))
    with closing(load(pair)):
        pass


def test_no_damaged_file_ends_a_server(tmp_path: Path) -> None:
    """A sample; `make test-hostile` has all."""
    found = run(tmp_path, "speech:0:24")
    tally = Counter(one["outcome"] for one in found)
    assert len(found) == 24
    assert not tally["died in service"], found
    assert tally["died in the trial"] >= 4 and tally["refused by llama.cpp"] >= 8
    assert tally["loads and answers"] >= 2
