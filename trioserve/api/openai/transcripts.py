"""How transcripts are written: as JSON, as subtitles, and as the events of a stream."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trioserve.api.base import sse, writers
from trioserve.api.openai.audio_request import TranscriptionRequest, TranslationRequest
from trioserve.server.transcription import (
    Segment,
    Summary,
    Text,
    Transcript,
    TranscriptEvent,
    TranscriptUsage,
)
from trioserve.types import TokenProbs

#: Whisper counts the places of segments in steps of 10 ms.
_STEPS_PER_SECOND = 100

#: The types of answers that are no JSON, by the `response_format`.
CONTENT_TYPES: Mapping[str, str] = {
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}


def as_json(transcript: Transcript, request: TranslationRequest) -> dict[str, Any]:
    """Write a transcript as ``json``."""
    body: dict[str, Any] = {"text": transcript.text}
    if isinstance(request, TranscriptionRequest) and request.include:
        body["logprobs"] = logprobs(transcript.probs)
    usage = transcript.summary.usage
    body["usage"] = _seconds(transcript) if usage is None else tokens(usage)
    return body


def as_verbose_json(transcript: Transcript, request: TranslationRequest) -> dict[str, Any]:
    """Write a transcript as ``verbose_json``: with its segments, or words, or both."""
    wanted: Iterable[str] = ()
    if isinstance(request, TranscriptionRequest):
        wanted = request.timestamp_granularities
    body: dict[str, Any] = {
        "task": "translate" if request.params.translate else "transcribe",
        "language": transcript.summary.language or "unknown",
        "duration": transcript.duration,
        "text": transcript.text,
    }
    if "word" in wanted:
        body["words"] = [
            {"word": each.text, "start": each.start, "end": each.end} for each in transcript.words
        ]
    if not wanted or "segment" in wanted:
        body["segments"] = [_segment(i, each) for i, each in enumerate(transcript.segments)]
    return {**body, "usage": _seconds(transcript)}


def _segment(index: int, segment: Segment) -> dict[str, Any]:
    data = segment.text.encode()
    return {
        "id": index,
        "seek": round(segment.start * _STEPS_PER_SECOND),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": len(data) / len(zlib.compress(data)),
        "no_speech_prob": segment.no_speech_prob,
    }


def tokens(usage: TranscriptUsage) -> dict[str, Any]:
    """Write the tokens that a transcript took."""
    n_input = usage.n_text + usage.n_audio
    return {
        "type": "tokens",
        "input_tokens": n_input,
        "input_token_details": {"text_tokens": usage.n_text, "audio_tokens": usage.n_audio},
        "output_tokens": usage.n_output,
        "total_tokens": n_input + usage.n_output,
    }


def _seconds(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration)}


def logprobs(probs: Sequence[TokenProbs]) -> list[dict[str, Any]]:
    """Write the tokens with their probabilities."""
    return [
        {
            "token": writers.decode_piece(each.chosen.piece),
            "bytes": list(each.chosen.piece),
            "logprob": each.chosen.logprob,
        }
        for each in probs
    ]


# -- as text


def as_text(transcript: Transcript) -> str:
    """Write the text alone."""
    return f"{transcript.text}\n"


def as_srt(transcript: Transcript) -> str:
    """Write subtitles as SubRip."""
    cues = [
        f"{i}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each.text)}\n\n"
        for i, each in enumerate(_shown(transcript), 1)
    ]
    return "".join(cues)


def as_vtt(transcript: Transcript) -> str:
    """Write subtitles as WebVTT."""
    cues = [
        f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_escaped(each.text)}\n\n"
        for each in _shown(transcript)
    ]
    return "".join(["WEBVTT\n\n", *cues])


def _shown(transcript: Transcript) -> list[Segment]:
    return [each for each in transcript.segments if each.text]


def _time(seconds: float, point: str) -> str:
    n_ms = round(seconds * 1000)
    n_s, n_ms = divmod(n_ms, 1000)
    return f"{n_s // 3600:02}:{n_s // 60 % 60:02}:{n_s % 60:02}{point}{n_ms:03}"


def _line(text: str) -> str:
    """Make one line of a text: an empty one would end the subtitle."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return _line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


AS_TEXT: Mapping[str, Callable[[Transcript], str]] = {
    "text": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
}


# -- as events


class TranscriptEvents:
    """Writes the events of a streamed transcript, and keeps what its last one repeats."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._texts: list[str] = []
        self._probs: list[TokenProbs] = []

    def encode(self, event: TranscriptEvent) -> bytes:
        """Write an event; empty when there is nothing to tell."""
        if isinstance(event, Text):
            return self._delta(event)
        return self._done(event) if isinstance(event, Summary) else b""

    def _delta(self, text: Text) -> bytes:
        self._texts.append(text.text)
        delta: dict[str, Any] = {"type": "transcript.text.delta", "delta": text.text}
        if self._with_logprobs and text.probs:
            self._probs += text.probs
            return sse.event({**delta, "logprobs": logprobs(text.probs)})
        return sse.event(delta) if text.text else b""

    def _done(self, summary: Summary) -> bytes:
        done: dict[str, Any] = {"type": "transcript.text.done", "text": "".join(self._texts)}
        if self._with_logprobs:
            done["logprobs"] = logprobs(self._probs)
        if summary.usage is not None:
            done["usage"] = tokens(summary.usage)
        return sse.event(done) + sse.DONE
