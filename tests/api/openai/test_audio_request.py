"""The fields of a form with a recording."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.api.base.body import Form
from trioserve.api.openai.audio import TranscriptionRequest, TranslationRequest
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.server.transcription.transcript import TranscriptionParams


def parsed(**fields: str | list[str]) -> TranscriptionRequest:
    """A request whose form has these fields; `_` at the end stands for ``[]``."""
    values = {
        name.replace("_list", "[]"): [value] if isinstance(value, str) else value
        for name, value in fields.items()
    }
    return TranscriptionRequest.parse(Form(fields=values, files={"file": b"RIFF"}))


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
    streamed = parsed(stream="True", include_list="logprobs")
    assert streamed.stream and streamed.params.logprobs


def test_a_translation_is_one() -> None:
    form = Form(fields={"language": ["de"]}, files={"file": b"RIFF"})
    assert TranslationRequest.parse(form).params == TranscriptionParams(translate=True)


def test_empty_fields_are_absent_and_a_file_is_enough() -> None:
    assert parsed().file == b"RIFF"
    assert parsed().params == TranscriptionParams()
    assert parsed(language="", prompt="", temperature="", include_list=[""]) == parsed()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "warm"}, "temperature", "a number"),
        ({"temperature": "nan"}, "temperature", "between 0 and 1"),
        ({"temperature": "1.5"}, "temperature", "between 0 and 1"),
        ({"stream": "perhaps"}, "stream", "true or false"),
        ({"language": "German, please"}, "language", "the code of a language"),
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


LISTS = ("keywords[]", "languages[]", "known_speaker_names[]", "known_speaker_references[]")


@pytest.mark.parametrize("name", ["response_format", *LISTS, "chunking_strategy[type]"])
def test_fields_that_no_transcriber_supports_are_refused(name: str) -> None:
    form = Form(fields={name: ["diarized_json"]}, files={"file": b"RIFF"})
    with pytest.raises(UnsupportedFieldError) as caught:
        TranscriptionRequest.parse(form)
    assert caught.value.param == name.partition("[")[0]


FILES = {"file": b"RIFF"}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (Form(fields={"file": ["RIFF"]}, files={}), "file"),
        (Form(fields={}, files={}), "file"),
        (Form(fields={}, files={"file": b""}), "file"),
        (Form(fields={}, files={"other": b"RIFF"}), "file"),
        (Form(fields={}, files=FILES | {"language": b"en"}), "language"),
        (Form(fields={}, files=FILES | {"include[]": b"logprobs"}), "include"),
    ],
)
def test_there_has_to_be_a_file_and_a_field_is_none(form: Form, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TranscriptionRequest.parse(form)
    assert caught.value.param is not None and caught.value.param.startswith(name)
