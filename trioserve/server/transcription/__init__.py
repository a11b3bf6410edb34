"""Recordings become text: by the loaded model, window by window, or by Whisper in a child."""

from __future__ import annotations

from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Text,
    Transcriber,
    Transcript,
    TranscriptEvent,
    TranscriptionParams,
    TranscriptUsage,
    Word,
)
from trioserve.server.transcription.transcriptions import Transcriptions, TranscriptStream

__all__ = [
    "Segment",
    "Summary",
    "Text",
    "Transcriber",
    "Transcript",
    "TranscriptEvent",
    "TranscriptStream",
    "TranscriptUsage",
    "TranscriptionParams",
    "Transcriptions",
    "Word",
]
