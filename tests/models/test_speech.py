"""The files of the model that speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gguf_models import write_flags
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.models import BUNDLED, speech
from trioserve.models.speech import SpeechFiles, resolve_speech


def write_projector(path: Path) -> Path:
    return write_flags(path, "clip.has_audio_encoder", "clip.has_gen_audio_encoder")


def test_the_projector_is_the_one_beside_the_model_that_makes_sound(tmp_path: Path) -> None:
    model = write_flags(tmp_path / "voice-Q8_0.gguf")
    config = Config(model="chat.gguf", tts=str(model))
    write_flags(tmp_path / "mmproj-chat-Q8_0.gguf", "clip.has_vision_encoder")
    (tmp_path / "mmproj-damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"name the one of voice-Q8_0\.gguf with --tts-mmproj"):
        resolve_speech(config)
    half = write_projector(tmp_path / "mmproj-voice-F16.gguf")
    assert resolve_speech(config) == SpeechFiles(model, half)
    eight = write_projector(tmp_path / "mmproj-voice-Q8_0.gguf")
    assert resolve_speech(config) == SpeechFiles(model, eight)
    named = Config(model="chat.gguf", tts=str(model), tts_mmproj=str(half))
    assert resolve_speech(named) == SpeechFiles(model, half)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path / "x.gguf"), "No such file"),
        (str(tmp_path), "is a directory"),
        ("user/voice", "run trioserve pull user/voice"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            resolve_speech(Config(tts=name))


def test_the_bundled_voice_is_for_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = SpeechFiles(tmp_path / "voice.gguf", tmp_path / "mmproj.gguf")
    monkeypatch.setattr(speech, "BUNDLED_VOICE", voice)
    german = Config(tts_lang="de")
    assert resolve_speech(Config()) is None
    with pytest.raises(ModelLoadError, match="The bundled model has no voice"):
        resolve_speech(german)
    write_flags(voice.model)
    write_projector(voice.projector)
    assert resolve_speech(Config()) == resolve_speech(german) == voice
    for other in (Config(tts="none"), Config(model=str(BUNDLED)), Config(embeddings=True)):
        assert resolve_speech(other) is None
    monkeypatch.setattr(speech, "has_extra", lambda name: False)
    assert resolve_speech(Config()) is None
