"""Speech of both families, sample by sample: beside llama.cpp's own helper, and in company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.speech_models import (
    END_ROW,
    FRAME,
    SpeechPair,
    recording,
    write_pocket,
    write_qwen,
)
from tests.support.speech_reference import Helper, forget_seed, said, seed_as_llama_cpp
from trioserve.config import Config
from trioserve.engine.speaker import Samples
from trioserve.llama.speech import pocket, qwen
from trioserve.llama.speech.speaker import LlamaSpeaker, speech_config
from trioserve.models.speech import SpeechFiles
from trioserve.types import FinishReason, SpeechTask

TEXT = "The cat sat on the mat."
Writer = Callable[..., SpeechPair]
WRITERS: dict[str, Writer] = {"pocket": write_pocket, "qwen": write_qwen}


def load(pair: SpeechPair, *, parallel: int = 4) -> LlamaSpeaker:
    files = SpeechFiles(pair.model, pair.projector)
    return LlamaSpeaker.load(speech_config(Config(parallel=parallel, threads=1), files))


@pytest.fixture(scope="module", params=sorted(WRITERS))
def speaker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaSpeaker]:
    pair = WRITERS[request.param](tmp_path_factory.mktemp(request.param))
    with closing(load(pair)) as made:
        yield made


@pytest.fixture(params=sorted(WRITERS))
def writer(request: pytest.FixtureRequest) -> Writer:
    return WRITERS[request.param]


@pytest.fixture
def helper(speaker: LlamaSpeaker) -> Iterator[Helper]:
    with closing(Helper(speaker)) as made:
        yield made


def difference(one: Samples, other: Samples) -> float:
    """The largest difference between two sounds of one length."""
    assert one.shape == other.shape
    assert one.std() > 1e-3, "it is silent"
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("has_voice", [False, True])
def test_alone_it_is_what_the_helper_makes(
    speaker: LlamaSpeaker, helper: Helper, monkeypatch: pytest.MonkeyPatch, has_voice: bool
) -> None:
    seed_as_llama_cpp(monkeypatch)
    ref = recording(1.3) if has_voice else None
    voice = None if ref is None else speaker.take_voice(ref)
    sounds = []
    for seed in (1, 2):
        # Beyond the window of Qwen3-TTS, but once only, for it takes long.
        n_frames = 75 if (seed, has_voice) == (1, True) else 20
        expected = helper.say(TEXT, seed, recording=ref, max_frames=n_frames)
        task = SpeechTask(
            id=1, pieces=[speaker.tokenize(TEXT)], seed=seed, voice=voice, max_frames=n_frames
        )
        forget_seed(speaker)
        samples, end = said(speaker, task)[1]
        assert end.n_frames * FRAME == len(samples)
        # Pocket TTS has smaller windows at first: sums of 16 bits are rounded in other places.
        assert difference(samples, expected) < 1e-4
        with monkeypatch.context() as patch:
            patch.setattr(pocket, "_WINDOWS", (8,))
            patch.setattr(qwen, "_FIRST_WINDOWS", (72,))
            forget_seed(speaker)
            samples, _ = said(speaker, task)[1]
        assert difference(samples, expected) == 0
        sounds.append(samples[: 10 * FRAME])
    assert difference(*sounds) > 1e-3, "the seed has no effect"


def test_a_text_of_several_pieces_is_what_the_helper_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper cuts a long text of Pocket TTS at its sentences, and begins anew with each."""
    seed_as_llama_cpp(monkeypatch)
    monkeypatch.setattr(pocket, "_WINDOWS", (8,))
    sentences = [
        "Hello, one two and the cat sat on it once again, one, two.",
        " Then the mat was on one more cat.",
    ]
    text, ref = "".join(sentences), recording(1.2, seed=3)
    with closing(load(write_pocket(tmp_path))) as speaker, closing(Helper(speaker)) as helper:
        tokens = speaker.tokenize(text)
        assert len(tokens) > speaker.max_piece
        n_first = 1 + max(i for i, token in enumerate(tokens[:-1]) if token == tokens[-1])
        voice = speaker.take_voice(ref)
        expected = helper.say(text, 5, recording=ref)
        pieces = tokens[:n_first], tokens[n_first:]
        task = SpeechTask(id=1, pieces=pieces, seed=5, voice=voice)
        forget_seed(speaker)
        assert difference(said(speaker, task)[1][0], expected) == 0


def test_a_text_of_qwen_ends_where_the_model_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_as_llama_cpp(monkeypatch)

    def change(tensors: dict[str, NDArray[np.floating]]) -> None:
        tensors["output.weight"][END_ROW] *= 4

    with (
        closing(load(write_qwen(tmp_path, change=change))) as speaker,
        closing(Helper(speaker)) as helper,
    ):
        lengths = set()
        for seed in range(4):
            expected = helper.say(TEXT, seed, max_frames=50)
            task = SpeechTask(id=1, pieces=[speaker.tokenize(TEXT)], seed=seed, max_frames=50)
            forget_seed(speaker)
            samples, end = said(speaker, task)[1]
            assert end.reason is FinishReason.EOS
            assert np.array_equal(samples, expected)
            lengths.add(end.n_frames)
        assert len(lengths) > 1


def test_language_changes_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_as_llama_cpp(monkeypatch)
    with closing(load(write_qwen(tmp_path))) as speaker, closing(Helper(speaker)) as helper:
        assert speaker.languages == ("english", "german", "chinese")
        sounds = []
        for code, name in (("de", "german"), ("en", "")):
            expected = helper.say(TEXT, 1, language=code, max_frames=20)
            for language in (code, name):
                task = SpeechTask(
                    id=1,
                    pieces=[speaker.tokenize(TEXT)],
                    seed=1,
                    language=language,
                    max_frames=20,
                )
                forget_seed(speaker)
                sounds.append(said(speaker, task)[1][0])
                assert difference(sounds[-1], expected) == 0
        assert difference(sounds[0], sounds[-1]) > 1e-3


def test_in_company_all_say_what_they_say_alone(speaker: LlamaSpeaker) -> None:
    """Up to rounding: other kernels compute a batch of more rows."""
    voice = speaker.take_voice(recording(1.0, seed=1))
    texts = ["One two.", "The cat sat on the mat.", "Hello, the cat.", "On the mat."]
    tasks = [
        SpeechTask(
            id=i,
            pieces=[speaker.tokenize(text), speaker.tokenize("Two more.")],
            # Two speakers of the same seed, too: each frame begins with its random numbers.
            seed=i // 2,
            voice=voice if i % 2 else None,
            max_frames=8,
        )
        for i, text in enumerate(texts)
    ]
    alone = {task.id: said(speaker, task)[task.id] for task in tasks}
    for own in (tasks, tasks[::-1]):
        for id_, (samples, end) in said(speaker, *own).items():
            expected, its_end = alone[id_]
            assert (end.reason, end.n_frames) == (its_end.reason, its_end.n_frames)
            assert difference(samples, expected) < 1e-3


@pytest.mark.parametrize("apart", [0, 3])
def test_what_others_say_has_no_part_in_it(tmp_path: Path, writer: Writer, apart: int) -> None:
    """Exactly: beside other texts, voices and seeds, in batches of the same shapes."""
    others = [[("abcde", "fgh"), ("klmno", "pqr")], [("zyxwv", "uts"), ("edcba", "zyx")]]
    with closing(load(writer(tmp_path, change_projector=_never_end))) as speaker:
        voices = [speaker.take_voice(recording(1.0, seed=seed)) for seed in (1, 2)]
        n_frames = 6 if speaker.languages else 14  # Qwen3-TTS takes long
        own = SpeechTask(
            id=1,
            pieces=[speaker.tokenize(text) for text in ("Hat.", "cats")],
            seed=7,
            voice=voices[0],
            max_frames=n_frames,
        )
        sounds = []
        for place, texts in enumerate(others):
            tasks = [
                SpeechTask(
                    id=i,
                    pieces=[speaker.tokenize(text) for text in pieces],
                    seed=7 if i == place + 2 else 99,  # one has the same seed
                    voice=voices[place],
                    max_frames=n_frames - 2,
                )
                for i, pieces in enumerate(texts, start=2)
            ]
            sounds.append(said(speaker, *tasks, own, apart=apart)[1][0])
        assert difference(*sounds) == 0


def _never_end(tensors: dict[str, NDArray[np.floating]]) -> None:
    if "a.gen.out_eos.bias" in tensors:
        tensors["a.gen.out_eos.bias"][:] = -100
