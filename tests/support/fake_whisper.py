"""A stand-in for faster-whisper, which the program that runs it imports in its place.

The prompt of a recording says what happens to it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_MODULE = """
import os, time
from types import SimpleNamespace as Any

print("loading")  # on stdout, which is not for this


class WhisperModel:
    supported_languages = ["en", "de"]

    def __init__(self, model, **settings):
        if model == "missing":
            raise RuntimeError("there is no such model")
        self.model = model

    def transcribe(self, samples, initial_prompt=None, **fields):
        return self._segments(len(samples), initial_prompt or "", fields), Any(language="de")

    def _segments(self, n_samples, prompt, fields):
        print("working")
        if prompt == "fail":
            raise ValueError("cannot do it")
        if prompt == "die":
            os._exit(3)
        yield self._segment(0.0, f" pid {os.getpid()}", fields)
        if prompt == "hang":
            time.sleep(1000)
        yield self._segment(1.0, f" samples {n_samples}", fields)
        yield self._segment(2.0, f" {sorted(fields.items())}", fields)

    def _segment(self, start, text, fields):
        words = [Any(word=" pid", start=0.0, end=0.5)] if fields["word_timestamps"] else None
        return Any(
            text=text, start=start, end=start + 1, tokens=[1, 2], temperature=0.0,
            avg_logprob=-0.5, no_speech_prob=0.25, words=words,
        )
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs that are started from here find it, and this one, too."""
    (folder / "faster_whisper.py").write_text(_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
