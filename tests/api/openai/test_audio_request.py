"""The fields of a form with a recording."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.api.base.forms import Form
from trioserve.api.openai.audio_request import TranscriptionRequest, TranslationRequest
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.server.transcription import TranscriptionParams


def parsed(**fields: str | list[str]) -> TranscriptionRequest:
    """A request whose form has these fields; `_` at the end stands for ``[]``."""
    values = {
        name.replace("_list", "[]"): [value] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    return TranscriptionRequest.parse(Form(fields=values, files={"file": b"RIFF"}))


def test_a_file_is_enough() -> None:
    request = parsed()
    assert request.file == b"RIFF"
    assert request.params == TranscriptionParams()


def test_fields_have_an_effect() -> None:
    request = parsed(
        model="m",
        language="de",
        prompt="Zoë",
        temperature="0.5",
        response_format="verbose_json",
        timestamp_granularities_list=["word", "segment"],
        chunking_strategy="auto",
        max_tokens="7",
        timeout="2.5",
        keep_alive="5m",
        stream="false",
    )
    assert request.params == TranscriptionParams(
        language="de",
        prompt="Zoë",
        temperature=0.5,
        timed=True,
        words=True,
        skip_silence=True,
        max_tokens=7,
    )
    assert (request.model, request.timeout, request.keep_alive) == ("m", 2.5, 300)


def test_a_stream_with_logprobs() -> None:
    request = parsed(stream="True", include_list="logprobs")
    assert request.stream and request.params.logprobs


def test_a_translation_is_one() -> None:
    form = Form(fields={"language": ["de"]}, files={"file": b"RIFF"})
    assert TranslationRequest.parse(form).params == TranscriptionParams(translate=True)


def test_empty_fields_are_absent() -> None:
    assert parsed(language="", prompt="", temperature="", include_list=[""]) == parsed()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "warm"}, "temperature", "a number"),
        ({"temperature": "nan"}, "temperature", "between 0 and 1"),
        ({"temperature": "1.5"}, "temperature", "between 0 and 1"),
        ({"stream": "perhaps"}, "stream", "true or false"),
        ({"language": "German, please"}, "language", "the code of a language"),
        ({"language": "en-\x00"}, "language", "the code of a language"),
        ({"prompt": "x" * 4097}, "prompt", "at most 4096"),
        ({"response_format": "xml"}, "response_format", '"json", "text"'),
        ({"timeout": "-1"}, "timeout", "seconds"),
        ({"timeout": "inf"}, "timeout", "seconds"),
        ({"max_tokens": "0"}, "max_tokens", "between 1"),
        ({"include_list": "embeddings"}, "include[]", '"logprobs"'),
        ({"timestamp_granularities_list": "word"}, "timestamp_granularities", "verbose_json"),
        (
            {"include_list": "logprobs", "response_format": "text"},
            "include",
            "needs the 'response_format'",
        ),
        ({"stream": "true", "response_format": "srt"}, "stream", "needs the 'response_format'"),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        parsed(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "param"),
    [
        ("response_format", "response_format"),
        ("keywords[]", "keywords"),
        ("languages[]", "languages"),
        ("known_speaker_names[]", "known_speaker_names"),
        ("known_speaker_references[]", "known_speaker_references"),
        ("chunking_strategy[type]", "chunking_strategy"),
    ],
)
def test_what_no_transcriber_can_do_is_refused(name: str, param: str) -> None:
    form = Form(fields={name: ["diarized_json"]}, files={"file": b"RIFF"})
    with pytest.raises(UnsupportedFieldError) as caught:
        TranscriptionRequest.parse(form)
    assert caught.value.param == param


@pytest.mark.parametrize("files", [{}, {"file": b""}, {"other": b"RIFF"}])
def test_there_has_to_be_a_file(files: dict[str, bytes]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TranscriptionRequest.parse(Form(fields={}, files=files))
    assert caught.value.param == "file"


FILES = {"file": b"RIFF"}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (Form(fields={"file": ["RIFF"]}, files={}), "file"),
        (Form(fields={}, files={"file": b""}), "file"),
        (Form(fields={}, files=FILES | {"language": b"en"}), "language"),
        (Form(fields={}, files=FILES | {"temperature": b"0"}), "temperature"),
        (Form(fields={}, files=FILES | {"stream": b"true"}), "stream"),
        (Form(fields={}, files=FILES | {"include[]": b"logprobs"}), "include"),
    ],
)
def test_a_file_is_no_field_and_a_field_no_file(form: Form, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TranscriptionRequest.parse(form)
    assert caught.value.param is not None and caught.value.param.startswith(name)
