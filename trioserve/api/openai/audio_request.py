"""What the forms of ``/v1/audio/transcriptions`` and ``/v1/audio/translations`` may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import attrs

from trioserve.api.base import readers
from trioserve.api.base.fields import (
    MismatchError,
    boolean,
    field,
    json_type,
    number,
    one_of,
    structure,
    text,
)
from trioserve.api.base.forms import Form
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.server.transcription import TranscriptionParams

_T = TypeVar("_T")

_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")

#: Those in which the times of segments are.
_TIMED = frozenset({"srt", "verbose_json", "vtt"})

#: Characters of `prompt`.
_MAX_PROMPT = 4096

_WORDS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}

#: Fields of OpenAI's that need what no transcriber here can do, and what to do instead.
_REFUSED: Mapping[str, str] = {
    "keywords": "name the words in 'prompt'",
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
    "languages": "name one in 'language', or none",
}


def _from_text(
    read: Callable[[Any], _T], convert: Callable[[str], Any] = str
) -> Callable[[Sequence[str]], _T]:
    """Make a reader of the values of a field of a form, of which the last one counts."""

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


@json_type({"type": "string", "maxLength": _MAX_PROMPT})
def _prompt(value: Any) -> str:
    if len(text(value)) > _MAX_PROMPT:
        raise MismatchError(f"a string of at most {_MAX_PROMPT} characters")
    return str(value)


@json_type({"type": "string", "pattern": "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$", "examples": ["en"]})
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

    @json_type({"type": "array", "items": {"enum": list(choices)}})
    def read(values: Sequence[str]) -> frozenset[str]:
        return frozenset(read_one(value) for value in values)

    return read


@json_type({"type": "string", "contentMediaType": "application/octet-stream"})
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
    prompt: str = field(read=_from_text(_prompt), default="")
    response_format: str = field(read=_from_text(one_of(*_FORMATS)), default="json")
    temperature: float = field(read=_from_text(_temperature, float), default=0.0)
    timeout: float | None = field(read=_SECONDS, default=None)
    keep_alive: float | None = field(read=_from_text(readers.keep_alive), default=None)

    @property
    def params(self) -> TranscriptionParams:
        """How the recording is to be transcribed."""
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
                raise UnsupportedFieldError(f"'{name}' is not supported: {instead}.", param=name)
        if filled.get("response_format") == ["diarized_json"]:
            raise UnsupportedFieldError(
                "'response_format' must not be \"diarized_json\": speakers are not told apart.",
                param="response_format",
            )
        if any(name.startswith("chunking_strategy[") for name in filled):
            raise UnsupportedFieldError(
                "'chunking_strategy' must be \"auto\": recordings are cut in their pauses.",
                param="chunking_strategy",
            )
        return structure(cls, {**filled, **form.files})


@attrs.frozen(kw_only=True, slots=False)
class TranscriptionRequest(TranslationRequest):
    """``POST /v1/audio/transcriptions``, a form: what is spoken is written as it is."""

    language: str | None = field(read=_from_text(_language), default=None)
    stream: bool = field(
        read=_from_text(boolean, lambda value: _WORDS[value.lower()]), default=False
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
    max_tokens: int | None = field(read=_from_text(readers.integer_in(1), int), default=None)

    def __attrs_post_init__(self) -> None:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise _only_with("timestamp_granularities", "verbose_json")
        if self.include and self.response_format != "json":
            raise _only_with("include", "json")
        if self.stream and self.response_format not in ("json", "text"):
            raise _only_with("stream", "json")

    @property
    def params(self) -> TranscriptionParams:
        """How the recording is to be transcribed."""
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
    return InvalidRequestError(
        f"'{name}' needs the 'response_format' \"{response_format}\".", param=name
    )
