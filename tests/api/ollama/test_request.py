"""The fields of requests to Ollama's routes. A field has an effect, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import ollama
import pytest

from tests.support.docs_pages import ROOT
from tests.support.scripts import HI
from trioserve.api.base.fields import fields_of
from trioserve.api.ollama.request import (
    UNSUPPORTED,
    UNSUPPORTED_IN_GENERATE,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from trioserve.errors import InvalidRequestError
from trioserve.types import GenerationParams, Grammar, MediaSource, SamplingParams

#: The fields left out since the last call, by the log, each with the reason.
LeftOut: TypeAlias = Callable[[], list[tuple[str, str]]]


def names_of(cls: Any) -> set[str]:
    return {name for field in fields_of(cls) for name in field.names}


@pytest.mark.parametrize(
    ("cls", "theirs", "neutral"),
    [
        (OllamaChatRequest, ollama._types.ChatRequest, UNSUPPORTED),
        (OllamaGenerateRequest, ollama._types.GenerateRequest, UNSUPPORTED_IN_GENERATE),
    ],
)
def test_every_field_of_ollama_s_client_is_known(cls: Any, theirs: Any, neutral: Any) -> None:
    assert theirs.model_fields.keys() - names_of(cls) - neutral.keys() - {"format"} == set()


def test_every_option_of_ollama_s_client_is_known_and_documented() -> None:
    known = names_of(OllamaOptions) | OllamaOptions.unsupported.keys()
    assert ollama.Options.model_fields.keys() - known == set()
    page = (ROOT / "docs" / "ollama.md").read_text(encoding="utf-8")
    for name in known:
        assert f"`{name}`" in page


def test_each_option_is_a_parameter() -> None:
    given = {
        "seed": 5,
        "temperature": 0.5,
        "top_k": 6,
        "top_p": 0.7,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repeat_last_n": 9,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "mirostat": 1,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "num_predict": 10,
        "num_keep": 11,
        "stop": ["a", "b"],
    }
    request = OllamaChatRequest.parse({"options": given | {"num_ctx": 8}})
    assert request.options.n_ctx == 8
    params = request.given_params()
    names = {"num_predict": "max_tokens", "num_keep": "n_keep"}
    assert params == {names.get(name, name): value for name, value in given.items()} | {
        "stop": ("a", "b")
    }
    fields = {*attrs.fields_dict(GenerationParams), *attrs.fields_dict(SamplingParams)}
    assert params.keys() <= fields


def test_options_win_and_null_is_nothing() -> None:
    body = {
        "seed": 1,
        "stop": ["x"],
        "top_k": 3,
        "options": {"seed": 2, "stop": "y", "top_p": None},
    }
    assert OllamaChatRequest.parse(body).given_params() == {"seed": 2, "stop": ("y",), "top_k": 3}


def test_the_number_of_tokens() -> None:
    for n, limit in ((5, 5), (0, -1), (-2, -1)):
        request = OllamaGenerateRequest.parse({"options": {"num_predict": n}})
        assert request.given_params() == {"max_tokens": limit}


def test_options_that_flags_decide_are_left_out(left_out: LeftOut) -> None:
    for name, only in OllamaOptions.unsupported.items():
        OllamaChatRequest.parse({"options": {name: None}})
        assert not left_out()
        OllamaChatRequest.parse({"options": {name: 3}})
        assert left_out() == [(f"options.{name}", only.harmless)]


def test_a_context_that_is_too_long_is_cut(left_out: LeftOut) -> None:
    request = OllamaChatRequest.parse({"options": {"num_ctx": 9}})
    request.options.check(9)
    assert not left_out()
    request.options.check(8)
    why = "a request has a context of 8 tokens, which --ctx-size sets"
    assert left_out() == [("options.num_ctx", why)]


def test_an_option_that_asks_for_nothing_is_taken() -> None:
    given = {
        "num_gpu": -1,
        "main_gpu": 0,
        "num_thread": 0,
        "use_mmap": True,
        "use_mlock": False,
        "numa": False,
        "embedding_only": False,
        "low_vram": False,
        "logits_all": False,
        "vocab_only": False,
        "penalize_newline": True,
        "tfs_z": 1.0,
        "unknown": 7,
    }
    assert OllamaChatRequest.parse({"options": given}).given_params() == {}


@pytest.mark.parametrize(
    ("cls", "body", "param"),
    [
        (OllamaChatRequest, {"format": "xml"}, "format"),
        (OllamaChatRequest, {"think": ""}, "think"),
        (OllamaChatRequest, {"top_logprobs": 3}, "top_logprobs"),
        (OllamaChatRequest, {"n": 2}, "n"),
        (OllamaChatRequest, {"_debug_render_only": True}, "_debug_render_only"),
        (OllamaGenerateRequest, {"images": ["aG?="]}, "images[0]"),
        (OllamaGenerateRequest, {"images": ["aGk="], "raw": True}, "images"),
        (OllamaGenerateRequest, {"images": ["aGk="], "suffix": "b"}, "images"),
        (OllamaGenerateRequest, {"prompt": 5, "images": ["aGk="]}, "prompt"),
        (OllamaGenerateRequest, {"template": "{{ .Prompt }}"}, "template"),
        (OllamaGenerateRequest, {"context": [1, 2]}, "context"),
        (OllamaGenerateRequest, {"width": 512}, "width"),
        (OllamaGenerateRequest, {"raw": True, "system": "Be brief."}, "system"),
        (OllamaGenerateRequest, {"raw": True, "suffix": "b"}, "suffix"),
        (OllamaGenerateRequest, {"raw": True, "think": True}, "think"),
        (OllamaGenerateRequest, {"suffix": "b", "system": "Be brief."}, "system"),
        (OllamaGenerateRequest, {"suffix": "b", "think": "low"}, "think"),
    ],
)
def test_a_refusal_names_the_parameter(cls: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        cls.parse({"messages": HI, "prompt": "a"} | body)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


def test_fields_of_ollama_s_clients_without_effect_are_accepted() -> None:
    OllamaChatRequest.parse({"messages": HI, "tools": [], "format": "", "options": {}})
    OllamaGenerateRequest.parse(
        {"prompt": "a", "system": "", "template": "", "suffix": "", "context": [], "images": []}
    )


def test_the_format_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert OllamaChatRequest.parse({"format": "json"}).grammar == Grammar("json_object")
    grammar = OllamaGenerateRequest.parse({"format": schema}).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.param) == ("json_schema", "format")
    assert OllamaChatRequest.parse({"format": ""}).grammar is None


def test_a_prompt_is_a_chat() -> None:
    body: dict[str, Any] = {"prompt": "Hi", "system": "Be brief."}
    request = OllamaGenerateRequest.parse(body)
    system = {"role": "system", "content": "Be brief."}
    assert request.messages == (system, *HI)
    assert request.stream
    assert not OllamaGenerateRequest.parse({**body, "stream": False}).stream
    source = MediaSource(kind="image", data=b"hi", param="images[0]")
    content = [{"type": "media", "media": source}, {"type": "text", "text": "Hi"}]
    shown = OllamaGenerateRequest.parse({**body, "images": ["aGk="]})
    assert shown.messages == (system, {"role": "user", "content": content})
