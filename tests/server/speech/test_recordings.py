"""The recordings of voices are found by their names, and decoded in a process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.media_files import av_file, image_file, wav_file
from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.server.speech import recordings
from trioserve.server.speech.recordings import find_recordings, read_recordings


def speaking(folder: Path | None = None, file: Path | None = None) -> Config:
    return Config(
        tts="v.gguf",
        tts_voices=None if folder is None else str(folder),
        tts_speaker_file=None if file is None else str(file),
    )


def test_a_voice_has_the_name_of_its_file(tmp_path: Path) -> None:
    assert find_recordings(speaking()) == {}
    for name in ("Ada.wav", "brian.MP3", "notes.txt", ".hidden.wav"):
        (tmp_path / name).touch()
    (tmp_path / "folder.wav").mkdir()
    voices = {"Ada": tmp_path / "Ada.wav", "brian": tmp_path / "brian.MP3"}
    assert find_recordings(speaking(tmp_path)) == voices
    own = tmp_path / "me.flac"
    assert find_recordings(speaking(tmp_path, own)) == {"default": own, **voices}
    assert find_recordings(speaking(file=own)) == {"default": own}


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = speaking(tmp_path, tmp_path / "x.wav")
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).touch()
    monkeypatch.setattr(recordings, "_MAX_VOICES", 2)
    with pytest.raises(ConfigError, match="tts_voices: 3 recordings are too many: 2 may be"):
        find_recordings(config)
    (tmp_path / "a.ogg").touch()
    with pytest.raises(ConfigError, match=r"a.ogg and .*a.wav are both the voice 'a'"):
        find_recordings(config)
    (tmp_path / "a.ogg").rename(tmp_path / "default.ogg")
    with pytest.raises(ConfigError, match=r"x.wav and .*default.ogg are both the voice 'default'"):
        find_recordings(config)
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    with pytest.raises(ConfigError, match=r"tts_voices: .* cannot be read: No such file"):
        find_recordings(config)


@pytest.mark.system
async def test_recordings_become_samples_at_the_rate_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "ada.wav").write_bytes(wav_file(0.5, rate=44_100))
    (tmp_path / "brian.flac").write_bytes(av_file("flac", "flac", seconds=1))
    voices = await read_recordings(speaking(tmp_path), 24_000)
    assert [*voices] == ["ada", "brian"]
    assert {one.rate for one in voices.values()} == {24_000}
    assert voices["ada"].seconds == pytest.approx(0.5, abs=0.01)
    assert np.frombuffer(voices["ada"].samples, np.float32).max() > 0.1
    assert await read_recordings(speaking(), 24_000) == {}


@pytest.mark.system
async def test_a_recording_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ada.wav"
    config = speaking(tmp_path)
    for data, message in (
        (image_file(), "ada.wav' is no sound, but a file of the format png"),
        (b"words", "ada.wav' is none of the files that are taken"),
        (wav_file(61), "ada.wav' is longer than 60 seconds"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"a voice cannot be used: .*{message}"):
            await read_recordings(config, 24_000)
    with pytest.raises(ConfigError, match=r"me.wav' is in a file that cannot be read: No such fil"):
        await read_recordings(speaking(file=tmp_path / "me.wav"), 24_000)
    path.write_bytes(wav_file(1))
    monkeypatch.setattr(recordings, "_MAX_BYTES", 50_000)
    with pytest.raises(ConfigError, match="tts_voices: as samples, they are more than"):
        await read_recordings(config, 24_000)
