"""`trioserve speak`: a text becomes a file of sound, by a server in another thread."""

from __future__ import annotations

import io
import os
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.canned_server import http_answer, json_answer, serving_paths
from tests.support.http_server import serving_script
from tests.support.media_files import wav_file
from tests.support.trio_thread import TrioThread
from trioserve.cli.commands.speak import _FORMATS
from trioserve.cli.main import run
from trioserve.media.encode import CONTENT_TYPES
from trioserve.testing import ScriptedBackend, ScriptedSpeaker, heard

TEXT = "Good morning."

Say = Callable[..., int]


@pytest.fixture
def say() -> Any:
    """Run the command with a server that speaks; `config` is that of the server."""

    def run_it(*argv: str, **config: Any) -> int:
        backend = ScriptedBackend(speaker=ScriptedSpeaker)
        with TrioThread() as thread, thread.open(serving_script(backend, **config)) as (url, _):
            return run("speak", [*argv, "--url", url], {})

    return run_it


def samples_in(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels()) == (24_000, 1)
        frames = file.readframes(10**8)
    return np.frombuffer(frames, "<i2").astype(np.float32) / 2**15


def test_the_ending_is_the_format(say: Say, tmp_path: Path) -> None:
    target = tmp_path / "morning.wav"
    target.write_bytes(b"older")
    assert say("Good", "morning.", "-o", str(target)) == 0
    assert heard(samples_in(target.read_bytes())) == TEXT
    with wave.open(str(target)) as file:
        assert 44 <= target.stat().st_size - 2 * file.getnframes() < 256
    for name, magic in (("a.MP3", b"ID3"), ("a.flac", b"fLaC"), ("a.ogg", b"OggS")):
        assert say(TEXT, "-o", str(tmp_path / name)) == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert say(TEXT, "-o", str(tmp_path / "a.mp3"), "--format", "flac") == 0
    assert (tmp_path / "a.mp3").read_bytes().startswith(b"fLaC")
    assert {*_FORMATS.values()} == {*CONTENT_TYPES}
    assert not [one for one in tmp_path.iterdir() if one.name.endswith(".part")]


def test_standard_input_and_output(
    say: Say, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for words in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXT}\n"))
        assert say(*words, "-o", "-") == 0
        assert heard(samples_in(capfdbinary.readouterr().out)) == TEXT


@pytest.mark.system
def test_a_voice_a_speed_and_a_language(say: Say, tmp_path: Path) -> None:
    voices, target = tmp_path / "voices", tmp_path / "a.wav"
    voices.mkdir()
    (voices / "ada.wav").write_bytes(wav_file(1))
    config = {"tts": "v.gguf", "tts_voices": str(voices)}
    assert say(TEXT, "-o", str(target), "--voice", "ada", "--language", "de", **config) == 0
    usual = samples_in(target.read_bytes())
    assert heard(usual) == TEXT and usual.min() < 0  # as with a voice
    assert say(TEXT, "-o", str(target), "--speed", "2") == 0
    assert len(samples_in(target.read_bytes())) == pytest.approx(len(usual) / 2, rel=0.1)


def test_what_the_server_refuses_leaves_no_file(
    say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a.wav"
    target.write_bytes(b"older")
    for argv, message in (
        (["--voice", "nobody"], "'voice' is not known; the voices are: default"),
        (["--speed", "9"], "'speed' must be between 0.25 and 4"),
        (["--language", "xx"], "'language' is not spoken"),
    ):
        assert say(TEXT, "-o", str(target), *argv) == 1
        assert message in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["a.wav"]
    assert target.read_bytes() == b"older"


def test_half_an_answer_leaves_the_older_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a.wav"
    target.write_bytes(b"older")
    half = http_answer(b"RIFF").replace(b"Length: 4", b"Length: 400")
    props = {"default_generation_settings": {"n_ctx": 100}}
    answers = {
        "/v1/models": json_answer({"data": [{"id": "m"}]}),
        "/props": json_answer(props),
        "/v1/audio/speech": half,
    }
    with serving_paths(answers) as url:
        assert run("speak", [TEXT, "-o", str(target), "--url", url], {}) == 1
    assert "is lost" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["a.wav"]
    assert target.read_bytes() == b"older"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([TEXT], "name a file, such as trioserve speak"),
        ([TEXT, "-o", "a.txt"], "-o: a.txt must end with one of .aac, .flac, .mp3"),
        ([TEXT, "-o", "/no/such/a.wav"], "-o: /no/such/a.wav cannot be written"),
        ([" ", "-o", "a.wav"], "speak needs a text"),
        ([TEXT, "-o", "a.wav", "--speed", "x"], "--speed: 'x' is not a number"),
        ([TEXT, "-o", "a.wav", "--format", "ape"], "--format must be one of mp3, opus"),
    ],
)
def test_wrong_arguments(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run("speak", argv, {}) == 2
    assert message in capsys.readouterr().err


def test_a_terminal_gets_no_sound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run("speak", [TEXT, "-o", "-"], {}) == 2
    assert "standard output is a terminal" in capsys.readouterr().err


def test_a_pipe_gets_the_sound_as_it_comes(say: Say, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert say("a", "-o", str(pipe), "--format", "pcm") == 0
        assert heard(np.frombuffer(os.read(reader, 2**20), "<i2") / np.float32(2**15)) == "a"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
