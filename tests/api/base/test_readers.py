"""Values that take more than one form."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.scripts import HI
from trioserve.api.base import readers
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.fields import MismatchError, structure
from trioserve.api.llama.completion import LlamaCompletionRequest, TokenizeRequest
from trioserve.api.openai.chat import CompletionRequest
from trioserve.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        (["a", 3], (("a", 3),)),
        (["a", "b"], ("a", "b")),
        ([[1, 2], "a", ["b", 3]], ((1, 2), "a", ("b", 3))),
        ({"prompt_string": "a"}, ("a",)),
        ([{"prompt_string": "a", "multimodal_data": []}], ("a",)),
    ],
)
def test_prompts(value: Any, prompts: Any) -> None:
    assert LlamaCompletionRequest.parse({"prompt": value}).prompts == prompts


@pytest.mark.parametrize(
    "value",
    [[], [[]], [1.5], [True], [None], {"prompt_string": "a", "multimodal_data": [1]}],
)
def test_bad_prompts(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        CompletionRequest.parse({"prompt": value})
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


def test_too_many_prompts() -> None:
    with pytest.raises(InvalidRequestError, match="256"):
        CompletionRequest.parse({"prompt": ["a"] * 257})


@pytest.mark.parametrize(
    ("value", "biases"),
    [
        ({"5": -1.5, "hi": False}, ((5, -1.5), ("hi", -math.inf))),
        ([[5, 1], ["hi", 2.5]], ((5, 1), ("hi", 2.5))),
        ({}, ()),
    ],
)
def test_logit_bias(value: Any, biases: Any) -> None:
    assert readers.biases(value) == biases


@pytest.mark.parametrize(
    "value", [[5], [[1]], [[1, True]], {"5": "x"}, [[1.5, 1]], {"5" * 5000: 1}]
)
def test_bad_logit_bias(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatRequest.parse({"messages": HI, "logit_bias": value})
    assert caught.value.param == "logit_bias"


def test_tokenize_takes_text_ids_and_both() -> None:
    assert structure(TokenizeRequest, {}).content == ""
    assert structure(TokenizeRequest, {"content": []}).content == ()
    assert structure(TokenizeRequest, {"content": [1, "a"]}).content == (1, "a")


SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
NESTED = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)
)


@settings(max_examples=50)
@given(NESTED)
def test_readers_read_or_say_what_they_want(value: Any) -> None:
    for read in (
        readers.prompts,
        readers.biases,
        readers.words,
        readers.samplers,
        readers.breakers,
        readers.content,
    ):
        try:
            assert isinstance(read(value), tuple | str)
        except MismatchError as error:
            assert error.expected  # noqa: PT017


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((300, 300), (0.5, 0.5), (0, 0), (-1, -1), ("-1s", -1), ("-1", -1), ("90", 90)),
        *(("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("300ms", 0.3), ("9999h", 35996400)),
    ],
)
def test_keep_alive(value: Any, seconds: float) -> None:
    assert readers.keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "m", "5 m", "5d", "5m ", "1h" * 40, True, [5], {"s": 5}])
def test_bad_keep_alive(value: Any) -> None:
    with pytest.raises(MismatchError):
        readers.keep_alive(value)
