"""OpenAI's routes for recordings: ``/v1/audio/transcriptions`` and ``/v1/audio/translations``.

Their forms, and how transcripts are written: as JSON, as subtitles, and as events of a stream.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Self, TypeVar

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import errors, limits, readers, reply, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.body import FLAGS, Form
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    DATA,
    NAME,
    MismatchError,
    boolean,
    field,
    integer_in,
    json_type,
    list_schema,
    number,
    one_of,
    structure,
    text,
)
from trioserve.api.base.models import Models
from trioserve.api.base.reply import Data, Reply, long_json
from trioserve.api.base.routes import FORM, Routes
from trioserve.api.base.scores import decode_piece
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.server.transcription.transcript import (
    Segment,
    Summary,
    Text,
    Transcript as Heard,
    TranscriptEvent,
    TranscriptionParams,
    TranscriptUsage,
)
from trioserve.types import MediaSource, TokenProbs

# -- forms


_T = TypeVar("_T")

_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")

#: Those in which the times of segments are.
_TIMED = frozenset({"srt", "verbose_json", "vtt"})

#: Characters of `prompt`.
_MAX_PROMPT = 4096

#: OpenAI's fields that no transcriber here supports, and what to do instead.
_REFUSED: Mapping[str, str] = {
    "keywords": "name the words in 'prompt'",
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
    "languages": "name one in 'language', or none",
}


def _from_text(
    read: Callable[[Any], _T], convert: Callable[[str], Any] = str
) -> Callable[[Sequence[str]], _T]:
    """Make a reader of a form field, which uses the last of its values."""

    @json_type(read.json_schema)  # type: ignore[attr-defined]
    def read_last(values: Sequence[str] | bytes) -> _T:
        if isinstance(values, bytes):
            raise MismatchError("a field of the form, and no file")
        try:
            value = convert(values[-1].strip())
        except (KeyError, ValueError):
            value = None  # of no type that is read
        return read(value)

    return read_last


@json_type({**NAME, "pattern": "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$", "examples": ["en"]})
def _language(value: Any) -> str:
    head, *rest = text(value).split("-")
    parts_are_well = all(2 <= len(each) <= 8 and each.isalnum() for each in rest)
    if not (head.isascii() and head.isalpha() and 2 <= len(head) <= 3 and parts_are_well):
        raise MismatchError('the code of a language, such as "en"')
    return str(value).lower()


@json_type({"type": "number", "minimum": 0, "maximum": 1})
def _temperature(value: Any) -> float:
    if not 0 <= number(value) <= 1:
        raise MismatchError("between 0 and 1")
    return float(value)


def _some_of(*choices: str) -> Callable[[Sequence[str]], frozenset[str]]:
    """Make a reader of a field with any number of values, each of them one of a few."""
    read_one = one_of(*choices)

    @json_type(list_schema({"enum": list(choices)}, limits.MAX_INCLUDED))
    def read(values: Sequence[str]) -> frozenset[str]:
        return frozenset(read_one(value) for value in values)

    return read


@json_type({**DATA, "contentMediaType": "application/octet-stream"})
def _file(value: Any) -> bytes:
    if not isinstance(value, bytes) or not value:  # a field of text, say
        raise MismatchError("a file, and not empty")
    return value


_SECONDS = _from_text(readers.seconds, float)


@attrs.frozen(kw_only=True, slots=False)
class TranslationRequest:
    """``POST /v1/audio/translations``, a form: what is spoken is written in English."""

    file: bytes = field(read=_file, repr=False)
    model: str | None = field(read=_from_text(readers.model_name), default=None)
    prompt: str = field(read=_from_text(readers.text_of(_MAX_PROMPT)), default="")
    response_format: str = field(read=_from_text(one_of(*_FORMATS)), default="json")
    temperature: float = field(read=_from_text(_temperature, float), default=0.0)
    timeout: float | None = field(read=_SECONDS, default=None)
    keep_alive: float | None = field(read=_from_text(readers.keep_alive), default=None)

    @property
    def params(self) -> TranscriptionParams:
        """The parameters of the transcription."""
        return TranscriptionParams(
            translate=True,
            prompt=self.prompt,
            temperature=self.temperature,
            timed=self.response_format in _TIMED,
        )

    @classmethod
    def parse(cls, form: Form) -> Self:
        """Read a form; empty fields count as absent.

        Raises:
            InvalidRequestError: a field is wrong; `param` names it.
        """
        given = {name: [one for one in values if one] for name, values in form.fields.items()}
        filled = {name: values for name, values in given.items() if values}
        for name, instead in _REFUSED.items():
            if name in filled or f"{name}[]" in filled:
                raise UnsupportedFieldError.at(name, f"is not supported: {instead}.")
        if filled.get("response_format") == ["diarized_json"]:
            raise UnsupportedFieldError.at(
                "response_format", 'must not be "diarized_json": speakers are not told apart.'
            )
        if any(name.startswith("chunking_strategy[") for name in filled):
            raise UnsupportedFieldError.at(
                "chunking_strategy", 'must be "auto": recordings are cut in their pauses.'
            )
        return structure(cls, {**filled, **form.files})


@attrs.frozen(kw_only=True, slots=False)
class TranscriptionRequest(TranslationRequest):
    """``POST /v1/audio/transcriptions``, a form: what is spoken is written as it is."""

    language: str | None = field(read=_from_text(_language), default=None)
    stream: bool = field(
        read=_from_text(boolean, lambda value: FLAGS[value.lower()]), default=False
    )
    timestamp_granularities: frozenset[str] = field(
        "timestamp_granularities[]",
        "timestamp_granularities",
        read=_some_of("word", "segment"),
        default=frozenset(),
    )
    include: frozenset[str] = field(
        "include[]", "include", read=_some_of("logprobs"), default=frozenset()
    )
    chunking_strategy: str | None = field(read=_from_text(one_of("auto")), default=None)
    max_tokens: int | None = field(read=_from_text(integer_in(1), int), default=None)

    def __attrs_post_init__(self) -> None:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise _only_with("timestamp_granularities", "verbose_json")
        if self.include and self.response_format != "json":
            raise _only_with("include", "json")
        if self.stream and self.response_format not in ("json", "text"):
            raise _only_with("stream", "json")

    @property
    def params(self) -> TranscriptionParams:
        """The parameters of the transcription."""
        return attrs.evolve(
            super().params,
            translate=False,
            language=self.language,
            max_tokens=self.max_tokens,
            skip_silence=self.chunking_strategy is not None,
            words="word" in self.timestamp_granularities,
            logprobs=bool(self.include),
        )


def _only_with(name: str, response_format: str) -> InvalidRequestError:
    return InvalidRequestError.at(name, f"needs the 'response_format' \"{response_format}\".")


# -- transcripts


#: Whisper counts the places of segments in steps of 10 ms.
_STEPS_PER_SECOND = 100


class _AudioTokens(Answer):
    text_tokens: int
    audio_tokens: int


class TokensUsed(Answer, tag_field="type", tag="tokens"):
    """The tokens that a transcript took."""

    input_tokens: int
    input_token_details: _AudioTokens
    output_tokens: int
    total_tokens: int


class SecondsUsed(Answer, tag_field="type", tag="duration"):
    """The length of a recording."""

    seconds: int


class _Logprob(Answer):
    token: str
    bytes: Sequence[int]
    logprob: float


class _Word(Answer):
    word: str
    start: float
    end: float


class _Segment(Answer):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcript(Answer, kw_only=True):
    """A transcript, with what its form has."""

    task: str | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    text: str
    logprobs: Sequence[_Logprob] | UnsetType = UNSET
    words: Sequence[_Word] | UnsetType = UNSET
    segments: Sequence[_Segment] | UnsetType = UNSET
    usage: TokensUsed | SecondsUsed


def as_json(transcript: Heard, request: TranslationRequest) -> Transcript:
    """Write a transcript as ``json``."""
    usage = transcript.summary.usage
    is_scored = isinstance(request, TranscriptionRequest) and request.include
    return Transcript(
        text=transcript.text,
        logprobs=logprobs(transcript.probs) if is_scored else UNSET,
        usage=_seconds(transcript) if usage is None else tokens(usage),
    )


def as_verbose_json(transcript: Heard, request: TranslationRequest) -> Transcript:
    """Write a transcript as ``verbose_json``: with its segments, or words, or both."""
    wanted: Iterable[str] = ()
    if isinstance(request, TranscriptionRequest):
        wanted = request.timestamp_granularities
    written = Transcript(
        task="translate" if request.params.translate else "transcribe",
        language=transcript.summary.language or "unknown",
        duration=transcript.duration,
        text=transcript.text,
        usage=_seconds(transcript),
    )
    if "word" in wanted:
        written.words = [_Word(each.text, each.start, each.end) for each in transcript.words]
    if not wanted or "segment" in wanted:
        written.segments = [_segment(i, each) for i, each in enumerate(transcript.segments)]
    return written


def _segment(index: int, segment: Segment) -> _Segment:
    data = segment.text.encode()
    seek, ratio = round(segment.start * _STEPS_PER_SECOND), len(data) / len(zlib.compress(data))
    return _Segment.like(segment, id=index, seek=seek, compression_ratio=ratio)


def tokens(usage: TranscriptUsage) -> TokensUsed:
    """Write the tokens that a transcript took."""
    n_input = usage.n_text + usage.n_audio
    details = _AudioTokens(usage.n_text, usage.n_audio)
    return TokensUsed(n_input, details, usage.n_output, n_input + usage.n_output)


def _seconds(transcript: Heard) -> SecondsUsed:
    return SecondsUsed(math.ceil(transcript.duration))


def logprobs(probs: Sequence[TokenProbs]) -> list[_Logprob]:
    """Write the tokens with their probabilities."""
    chosen = (each.chosen for each in probs)
    return [_Logprob(decode_piece(one.piece), list(one.piece), one.logprob) for one in chosen]


# -- as text


def as_text(transcript: Heard) -> str:
    """Return the text without times."""
    return f"{transcript.text}\n"


def as_srt(transcript: Heard) -> str:
    """Write subtitles as SubRip."""
    cues = enumerate(_cues(transcript, ",", _line), 1)
    return "".join(f"{i}\n{cue}" for i, cue in cues)


def as_vtt(transcript: Heard) -> str:
    """Write subtitles as WebVTT."""
    return "".join(["WEBVTT\n\n", *_cues(transcript, ".", _escaped)])


def _cues(transcript: Heard, point: str, write: Callable[[str], str]) -> Iterator[str]:
    """Write the segments that have a text, with the point that the format has in times."""
    for each in filter(attrgetter("text"), transcript.segments):
        yield f"{_time(each.start, point)} --> {_time(each.end, point)}\n{write(each.text)}\n\n"


def _time(seconds: float, point: str) -> str:
    n_ms = round(seconds * 1000)
    n_s, n_ms = divmod(n_ms, 1000)
    return f"{n_s // 3600:02}:{n_s // 60 % 60:02}:{n_s % 60:02}{point}{n_ms:03}"


def _line(text: str) -> str:
    """Make one line of a text: an empty one would end the subtitle."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return _line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


#: Writers of transcripts as text, with their content types, by `response_format`.
AS_TEXT: Mapping[str, tuple[Callable[[Heard], str], str]] = {
    "text": (as_text, "text/plain; charset=utf-8"),
    "srt": (as_srt, "application/x-subrip; charset=utf-8"),
    "vtt": (as_vtt, "text/vtt; charset=utf-8"),
}


# -- as events


class TranscriptEvents(sse.EventWriter[TranscriptEvent]):
    """Writes the events of a streamed transcript, and keeps what its last one repeats."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._texts: list[str] = []
        self._probs: list[TokenProbs] = []

    def encode(self, index: int, event: TranscriptEvent) -> bytes:
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


# -- routes


routes = Routes(of_model=True)

#: The size of a segment in a long answer, as `Json` counts.
_SEGMENT_SIZE = 128


@routes.post("/v1/audio/transcriptions", "/audio/transcriptions")
@takes(TranscriptionRequest, content=FORM)
@gives(Transcript)
async def transcriptions(request: TranscriptionRequest, caller: Caller, models: Models) -> Reply:
    """Transcribe a recording, at once or as a stream."""
    return await translations(request, caller, models)


@routes.post("/v1/audio/translations", "/audio/translations")
@takes(TranslationRequest, content=FORM)
@gives(Transcript)
async def translations(request: TranslationRequest, caller: Caller, models: Models) -> Reply:
    """Translate the speech in a recording to English."""
    server = await models.use(request.model, caller)
    (await server.known_model()).check_transcribes()
    context = await caller.counted(server, request.timeout, request.keep_alive)
    await caller.keep_awake(server, context)
    source = MediaSource(kind="audio", data=request.file, param="file")
    stream = await caller.open(server.transcribing(source, request.params, context))
    if isinstance(request, TranscriptionRequest) and request.stream:
        writer = TranscriptEvents(with_logprobs=bool(request.include))
        events = reply.EventSource.of(stream.__anext__)
        pings = reply.Pings(reply.KeepAlive.every(server.config.sse_ping_interval).interval)
        return await reply.stream(events, writer, pings, partial(errors.last_event, caller.path))
    transcript = await stream.read()
    wanted = request.response_format
    if wanted in AS_TEXT:
        write, content_type = AS_TEXT[wanted]
        return Data(body=write(transcript).encode(), content_type=content_type)
    write_json = as_verbose_json if wanted == "verbose_json" else as_json
    size = _SEGMENT_SIZE * len(transcript.segments) + len(transcript.probs)
    return long_json(lambda: write_json(transcript, request), size)
