"""A recording as a form for the process of a model, and the transcript in its answer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from werkzeug.datastructures import Headers
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartEncoder, Preamble

from trioserve.chat.media_parts import Audio
from trioserve.errors import InvalidMediaError
from trioserve.server.transcription import Segment, Summary, Transcript, Word

#: A recording: a path, or the bytes of a file.
Recording = Audio | bytes | str | os.PathLike[str]


def write_form(body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Write a form; returns its type, and the form. Reads the recording in the field ``file``.

    Raises:
        InvalidMediaError: the recording cannot be read.
    """
    boundary = secrets.token_hex(16).encode()
    encoder = MultipartEncoder(boundary)
    form = [encoder.send_event(Preamble(data=b""))]
    for name, value in body.items():
        for one in value if isinstance(value, tuple | list) else [value]:
            if name == "file":
                event: Field | File = File(name=name, filename="recording", headers=Headers())
                data = _read(one)
            else:
                event = Field(name=name, headers=Headers())
                data = (str(one).lower() if isinstance(one, bool) else str(one)).encode()
            form.append(encoder.send_event(event))
            form.append(encoder.send_event(Data(data=data, more_data=False)))
    form.append(encoder.send_event(Epilogue(data=b"")))
    return b"multipart/form-data; boundary=" + boundary, b"".join(form)


def _read(recording: Recording) -> bytes:
    file = recording.file if isinstance(recording, Audio) else recording
    if isinstance(file, bytes):
        return file
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidMediaError(f"{file!r} cannot be read: {error.strerror}.") from error


def read_transcript(answer: Mapping[str, Any]) -> Transcript:
    """Read an answer in the form ``verbose_json``."""
    language = answer["language"]
    words = [Word(text=one["word"], start=one["start"], end=one["end"])
             for one in answer.get("words", ())]  # fmt: skip
    segments = answer.get("segments", ())
    starts = [-inf, *(one["start"] for one in segments[1:]), inf]
    return Transcript(
        text=answer["text"],
        segments=tuple(
            _segment(one, tuple(word for word in words if start <= word.start < end))
            for one, (start, end) in zip(segments, pairwise(starts), strict=False)
        ),
        probs=(),
        duration=answer["duration"],
        summary=Summary(language=None if language == "unknown" else language),
    )


def _segment(one: Mapping[str, Any], words: tuple[Word, ...]) -> Segment:
    return Segment(
        text=one["text"],
        start=one["start"],
        end=one["end"],
        tokens=tuple(one["tokens"]),
        words=words,
        temperature=one["temperature"],
        avg_logprob=one["avg_logprob"],
        no_speech_prob=one["no_speech_prob"],
    )
