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
    Transcriptions,
    TranscriptStream,
    TranscriptUsage,
    Word,
)

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
