"""Transcripts as they are written."""

from __future__ import annotations

import pytest
from msgspec import to_builtins

from trioserve.api.openai import audio
from trioserve.api.openai.audio import TranscriptionRequest, TranslationRequest
from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Transcript,
    TranscriptUsage,
    Word,
)

SAID = Transcript(
    text="One & two. --> <Three>",
    segments=(
        Segment(
            text="One & two.",
            start=0.5,
            end=61.0004,
            tokens=(1, 2),
            words=(Word(text="One", start=0.5, end=1.0), Word(text="two.", start=2.0, end=2.5)),
            avg_logprob=-0.25,
            no_speech_prob=0.125,
        ),
        Segment(text="", start=62, end=63),
        Segment(text="-->\n\n<Three>", start=3661.25, end=3662.9996),
    ),
    probs=(),
    duration=3662.5,
    summary=Summary(language="en"),
)


@pytest.mark.parametrize(
    ("format", "written"),
    [
        ("text", "One & two. --> <Three>\n"),
        (
            "srt",
            "1\n00:00:00,500 --> 00:01:01,000\nOne & two.\n\n"
            "2\n01:01:01,250 --> 01:01:03,000\n-> <Three>\n\n",
        ),
        (
            "vtt",
            "WEBVTT\n\n"
            "00:00:00.500 --> 00:01:01.000\nOne &amp; two.\n\n"
            "01:01:01.250 --> 01:01:03.000\n-&gt; &lt;Three&gt;\n\n",
        ),
    ],
)
def test_texts_and_subtitles(format: str, written: str) -> None:
    write, _ = audio.AS_TEXT[format]
    assert write(SAID) == written


def test_verbose_json_has_segments() -> None:
    request = TranscriptionRequest(file=b"any", response_format="verbose_json")
    body = to_builtins(audio.as_verbose_json(SAID, request))
    first, *_ = body.pop("segments")
    assert body == {
        "task": "transcribe",
        "language": "en",
        "duration": 3662.5,
        "text": SAID.text,
        "usage": {"type": "duration", "seconds": 3663},
    }
    assert first.pop("compression_ratio") == pytest.approx(10 / 18)
    assert first == {
        "id": 0,
        "seek": 50,
        "start": 0.5,
        "end": 61.0004,
        "text": "One & two.",
        "tokens": (1, 2),
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "no_speech_prob": 0.125,
    }


@pytest.mark.parametrize("wanted", [{"word"}, {"segment"}, {"word", "segment"}])
def test_verbose_json_has_the_wanted_granularities(wanted: set[str]) -> None:
    request = TranscriptionRequest(
        file=b"any", response_format="verbose_json", timestamp_granularities=frozenset(wanted)
    )
    body = to_builtins(audio.as_verbose_json(SAID, request))
    assert body.keys() & {"words", "segments"} == {f"{name}s" for name in wanted}
    if "words" in body:
        assert body["words"][1] == {"word": "two.", "start": 2.0, "end": 2.5}
    translated = TranslationRequest(file=b"any", response_format="verbose_json")
    assert to_builtins(audio.as_verbose_json(SAID, translated))["task"] == "translate"


def test_usage_is_in_tokens_where_they_are_counted() -> None:
    request = TranscriptionRequest(file=b"any")
    assert to_builtins(audio.as_json(SAID, request))["usage"] == {
        "type": "duration",
        "seconds": 3663,
    }
    usage = TranscriptUsage(n_text=5, n_audio=100, n_output=20)
    counted = Transcript(text="", segments=(), probs=(), duration=1, summary=Summary(usage=usage))
    assert to_builtins(audio.as_json(counted, request))["usage"] == {
        "type": "tokens",
        "input_tokens": 105,
        "input_token_details": {"text_tokens": 5, "audio_tokens": 100},
        "output_tokens": 20,
        "total_tokens": 125,
    }
