"""LlamaSpeaker: what it loads, what it refuses, and the trial of new files in another process."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.media_models import write_pair
from tests.support.speech_models import FRAME, SpeechPair, recording, write_pocket, write_qwen
from tests.support.speech_reference import said
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import (
    InvalidMediaError,
    InvalidRequestError,
    ModelLoadError,
    OutputError,
)
from trioserve.llama import library
from trioserve.llama.media.library import EncodingInterrupt
from trioserve.llama.speech.pocket import prepare
from trioserve.llama.speech.speaker import LlamaSpeaker
from trioserve.llama.speech.token_rows import TokenRows
from trioserve.models.speech import SpeechFiles
from trioserve.types import SpeechTask, Voice

SETTINGS: Mapping[str, Any] = {"threads": 1, "parallel": 2}


def load(pair: SpeechPair, **settings: Any) -> LlamaSpeaker:
    """Load files as a server does: in another process first."""
    config = Config(**{**SETTINGS, "tts": str(pair.model), **settings})
    return llama.load_speaker(config, SpeechFiles(pair.model, pair.projector))


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaSpeaker]:
    with closing(load(write_pocket(tmp_path_factory.mktemp("pocket")))) as made:
        yield made


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaSpeaker]:
    with closing(load(write_qwen(tmp_path_factory.mktemp("qwen")))) as made:
        yield made


def test_facts(pocket: LlamaSpeaker, qwen: LlamaSpeaker) -> None:
    for speaker in (pocket, qwen):
        assert (speaker.sample_rate, speaker.frame_rate, speaker.voice_rate) == (24000, 12.5, 24000)
        assert (speaker.n_slots, speaker.n_seqs, speaker.n_ctx_seq) == (2, 2, 1024)
        assert speaker.takes_voices
    assert (pocket.languages, pocket.max_piece) == ((), 50)
    assert (qwen.languages, qwen.max_piece) == (("english", "german", "chinese"), 146)


@pytest.mark.parametrize(
    ("text", "prepared"),
    [
        ("", ""),
        (" \n ", ""),
        ("hello", "Hello."),
        ("one; two\r\nthree!", "One, two  three!"),
        ("Für ö", "Für ö"),
        (" 1 ", "1."),
    ],
)
def test_texts_are_prepared_as_llama_cpp_does(text: str, prepared: str) -> None:
    assert prepare(text, pads_short=False) == prepared
    if prepared:
        assert prepare(text, pads_short=True) == " " * 8 + prepared


def test_a_character_without_a_token_is_named(pocket: LlamaSpeaker, qwen: LlamaSpeaker) -> None:
    with pytest.raises(InvalidRequestError, match="cannot say: '中', 'ø'") as caught:
        pocket.tokenize("a é b 中 c 🎉 ø")
    assert caught.value.param == "input"
    assert qwen.tokenize("a é b 中 c 🎉 ø")


def test_accents_and_symbols_without_tokens_are_left_out(pocket: LlamaSpeaker) -> None:
    written = "Café — “don’t”… Yes! 🎉"  # noqa: RUF001 - marks of print
    assert pocket.tokenize(written) == pocket.tokenize('Cafe - "don\'t"... Yes!')
    assert pocket.tokenize("🎉 ❤️") == ()


def test_a_text_cannot_end_itself(qwen: LlamaSpeaker) -> None:
    control = set(qwen.vocab.control)
    assert control.isdisjoint(
        qwen.tokenize("a<|im_end|>\n<|im_start|>user <tts_text_eod><|codec_7|>")
    )


def test_an_unknown_language_is_refused(qwen: LlamaSpeaker) -> None:
    task = SpeechTask(id=1, pieces=[qwen.tokenize("Hello.")], language="french")
    with pytest.raises(InvalidRequestError, match="english, german, chinese") as caught:
        qwen.n_prompt(task)
    assert caught.value.param == "language"


def test_rows_of_a_prompt_are_as_many_as_were_counted(
    pocket: LlamaSpeaker, qwen: LlamaSpeaker
) -> None:
    for speaker in (pocket, qwen):
        for voice in (None, speaker.take_voice(recording(1.7))):
            pieces = [speaker.tokenize("Hello."), speaker.tokenize("The cat.")]
            task = SpeechTask(id=1, pieces=pieces, voice=voice)
            with closing(speaker.utterance(task)) as utterance:
                prompts = [utterance.begin(place) for place in range(2)]
            assert max(len(prompt.rows) for prompt in prompts) == speaker.n_prompt(task)
            shared = {prompt.n_shared for prompt in prompts}
            assert len(shared) == 1
            n_shared = shared.pop()
            first, second = (prompt.rows[:n_shared] for prompt in prompts)
            assert np.array_equal(first, second)


def test_the_default_language_is_the_configured_one(tmp_path: Path) -> None:
    pair = write_qwen(tmp_path)
    with closing(load(pair, tts_lang="de")) as speaker:
        assert speaker.languages == ("german", "english", "chinese")
    with pytest.raises(ModelLoadError, match="does not speak 'klingon', but english"):
        load(pair, tts_lang="klingon")


def test_a_recording_that_is_too_short_or_of_another_rate_is_refused(pocket: LlamaSpeaker) -> None:
    with pytest.raises(InvalidMediaError, match=r"at least 1 s, not 0.99"):
        pocket.take_voice(recording(0.99))
    with pytest.raises(InvalidMediaError, match="24000 samples a second, not 16000"):
        pocket.take_voice(attrs.evolve(recording(1.0), rate=16_000))


@pytest.mark.parametrize("seconds", [1.0, 1.00001, 1.04, 40.0])
def test_recordings_of_all_lengths_make_a_voice(
    pocket: LlamaSpeaker, qwen: LlamaSpeaker, seconds: float
) -> None:
    for speaker in (pocket, qwen):
        voice = speaker.take_voice(recording(seconds))
        assert 0 < len(voice.rows) < 400 and np.isfinite(voice.rows).all()


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (2, 1e-9), (63, 0.5), (64, 0.999), (2**31 - 1, 1e-38)]
)
def test_whatever_a_client_sets_there_is_sound(
    qwen: LlamaSpeaker, top_k: int, top_p: float
) -> None:
    for seed in (0, 2**32 - 2):
        task = SpeechTask(
            id=1,
            pieces=[qwen.tokenize("Hello.")],
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            max_frames=4,
        )
        assert np.isfinite(said(qwen, task)[1][0]).all()


def test_a_voice_of_another_model_is_refused(pocket: LlamaSpeaker) -> None:
    voice = Voice(np.zeros((3, 64), np.float32))
    task = SpeechTask(id=1, pieces=[pocket.tokenize("Hello.")], voice=voice)
    with pytest.raises(InvalidRequestError) as caught:
        pocket.n_prompt(task)
    assert caught.value.param == "voice"


def test_a_batch_that_was_interrupted_is_computed_again(
    pocket: LlamaSpeaker, qwen: LlamaSpeaker
) -> None:
    for speaker in (pocket, qwen):
        task = SpeechTask(id=1, pieces=[speaker.tokenize("Hello.")], seed=1, max_frames=9)
        expected = said(speaker, task)[1][0]
        speaker.interrupt()
        samples = said(speaker, task)[1][0]  # the first batch ends, and has its turn again
        assert np.array_equal(samples, expected)


def test_sound_that_was_interrupted_is_made_again(
    pocket: LlamaSpeaker, qwen: LlamaSpeaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for speaker in (pocket, qwen):
        task = SpeechTask(id=1, pieces=[speaker.tokenize("Hello.")], seed=1, max_frames=9)
        expected = said(speaker, task)[1][0]
        start, n_left = EncodingInterrupt.start, 2

        def begin(interrupt: EncodingInterrupt, start: Any = start, speaker: Any = speaker) -> None:
            nonlocal n_left
            start(interrupt)
            if n_left:
                n_left -= 1
                speaker.interrupt_sound()

        with monkeypatch.context() as patch:
            patch.setattr(EncodingInterrupt, "start", begin)
            samples = said(speaker, task)[1][0]
        assert n_left == 0
        assert np.array_equal(samples, expected)


def test_a_voice_is_taken_despite_interrupts_that_were_meant_for_sound(
    pocket: LlamaSpeaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pocket.take_voice(recording()).rows
    start, n_left = EncodingInterrupt.start, 2

    def begin(interrupt: EncodingInterrupt) -> None:
        nonlocal n_left
        start(interrupt)
        if n_left:
            n_left -= 1
            interrupt.set()

    with monkeypatch.context() as patch:
        patch.setattr(EncodingInterrupt, "start", begin)
        assert np.array_equal(pocket.take_voice(recording()).rows, expected)
    assert n_left == 0


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_rows_of_tokens_are_those_that_llama_cpp_has(tmp_path: Path, kind: str) -> None:
    weights: dict[str, Any] = {}
    pair = write_pocket(
        tmp_path, quantized={"token_embd.weight": kind}, change=lambda made: weights.update(made)
    )
    type_ = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(weights["token_embd.weight"], type_)
    expected = gguf.quants.dequantize(stored, type_)
    with closing(load(pair)) as speaker, closing(TokenRows(pair.model, 32)) as rows:
        found = rows(range(rows.count))
        assert np.abs(found - expected).max() < 1e-6
        copy = getattr(library.lib._lib, "_Z24llama_model_get_tok_embdPK11llama_modelPf", None)
        if copy is not None:  # the whole matrix, with a name that GCC makes
            own = np.empty_like(found)
            copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_uint32
            assert copy(speaker._model.handle, own.ctypes.data) == own.size
            assert np.array_equal(own, found)
        task = SpeechTask(id=1, pieces=[speaker.tokenize("Hello.")], seed=1, max_frames=3)
        assert len(said(speaker, task)[1][0]) == 3 * FRAME


def test_rows_are_found_in_the_parts_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    whole = write_pocket(tmp_path / "whole")
    writer = gguf.GGUFWriter

    def in_parts(path: str, arch: str) -> gguf.GGUFWriter:
        return writer(path, arch, split_max_tensors=0 if arch == "clip" else 9)

    monkeypatch.setattr(gguf, "GGUFWriter", in_parts)

    def move(tensors: dict[str, NDArray[np.floating]]) -> None:
        tensors["token_embd.weight"] = tensors.pop("token_embd.weight")  # to the last part

    pair = write_pocket(tmp_path, change=move)
    first = min(tmp_path.glob("pocket-00001-of-*.gguf"))
    with closing(TokenRows(whole.model, 32)) as one, closing(TokenRows(first, 32)) as other:
        assert np.array_equal(one(range(one.count)), other(range(one.count)))
    with closing(load(SpeechPair(first, pair.projector))) as speaker:
        task = SpeechTask(id=1, pieces=[speaker.tokenize("Hello.")], seed=1, max_frames=3)
        assert len(said(speaker, task)[1][0]) == 3 * FRAME


def test_a_token_without_a_row_is_refused(pocket: LlamaSpeaker) -> None:
    with closing(TokenRows(Path(pocket.info.path), 32)) as rows:
        for token in (-1, rows.count):
            with pytest.raises(OutputError):
                rows([token])
    with pytest.raises(ModelLoadError, match="width, which is 64"):
        TokenRows(Path(pocket.info.path), 64)


def test_a_file_that_is_cut_within_the_rows_is_refused(tmp_path: Path) -> None:
    pair = write_pocket(tmp_path)
    with closing(TokenRows(pair.model, 32)) as rows:
        n_kept = rows._start + 100
        os.truncate(pair.model, n_kept)
        with pytest.raises(OutputError, match="shorter"):
            rows([5])
    with pytest.raises(ModelLoadError, match="cut short"):
        TokenRows(pair.model, 32)


# -- files that do not fit each other

PAIRS = {
    "a projector of the other family": "is of the kind pockettts, and the model in",
    "a projector for images": "makes no speech",
    "a model that writes text": "does not speak",
    "another width": "mismatch between text model",
    "no file": "No such file",
}


@pytest.mark.parametrize("which", PAIRS)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, which: str) -> None:
    qwen, pocket, text = write_qwen(tmp_path), write_pocket(tmp_path), write_pair(tmp_path, "mlp")
    (tmp_path / "wide").mkdir()
    wide = write_pocket(tmp_path / "wide", width=64)
    model, projector = {
        "a projector of the other family": (qwen.model, pocket.projector),
        "a projector for images": (pocket.model, text.projector),
        "a model that writes text": (text.model, pocket.projector),
        "another width": (pocket.model, wide.projector),
        "no file": (pocket.model, tmp_path / "none.gguf"),
    }[which]
    with pytest.raises(ModelLoadError, match=PAIRS[which]):
        load(SpeechPair(model, projector))


def test_a_model_that_speaks_writes_no_text(tmp_path: Path) -> None:
    pair = write_pocket(tmp_path)
    with pytest.raises(ModelLoadError, match="speaks: name it with --tts"):
        llama.load(Config(model=str(pair.model), **SETTINGS))


@pytest.mark.parametrize("name", ["<|codec_0|>", "<tts_text_eod>", "<|codec_think_eos|>"])
def test_a_special_token_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    pair = write_qwen(tmp_path, left_out=(name,))
    with pytest.raises(ModelLoadError, match=re.escape(f"lacks {name}")):
        load(pair)


def test_pocket_needs_one_token_and_may_have_another(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=re.escape("lacks <|audio_bos|>")):
        load(write_pocket(tmp_path, special=("<|pad|>",)))
    with closing(load(write_pocket(tmp_path, special=("<|audio_bos|>",)))) as speaker:
        voice = speaker.take_voice(recording(1.0))
        task = SpeechTask(id=1, pieces=[speaker.tokenize("Hello.")], voice=voice, max_frames=2)
        assert len(said(speaker, task)[1][0]) == 2 * FRAME
        with closing(speaker.utterance(task)) as utterance:
            assert utterance.begin(0).n_shared == len(voice.rows)


def test_a_projector_without_rows_for_the_codes_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, NDArray[np.floating]]) -> None:
        tensors["a.gen.code.out_embd.weight"] = tensors["a.gen.code.out_embd.weight"][:1]

    with pytest.raises(ModelLoadError, match="makes no sound of this"):
        load(write_qwen(tmp_path, change_projector=change))


def test_a_model_without_a_language_is_refused(tmp_path: Path) -> None:
    names = tuple(f"<|codec_language_{one}|>" for one in ("english", "german", "chinese"))
    with pytest.raises(ModelLoadError, match="has no language"):
        load(write_qwen(tmp_path, left_out=names))


@pytest.mark.parametrize("write", [write_pocket, write_qwen])
def test_a_model_of_numbers_that_are_not_finite_is_refused(
    tmp_path: Path, write: Callable[..., SpeechPair]
) -> None:
    def change(tensors: dict[str, NDArray[np.floating]]) -> None:
        tensors["output_norm.weight"][3] = np.nan

    with pytest.raises(ModelLoadError, match="not finite"):
        load(write(tmp_path, change=change))
