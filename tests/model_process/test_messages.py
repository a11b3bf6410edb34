"""Messages between an app and the process of a model come out as they went in."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec import Raw

from trioserve import errors
from trioserve.children.frames import FrameError
from trioserve.errors import InvalidRequestError, TrioServeError
from trioserve.model_process.messages import (
    Answered,
    PromptFacts,
    Refused,
    SentError,
    Wrote,
    prompt_in,
    read_order,
    read_said,
    read_value,
    sent_prompt,
    write,
)
from trioserve.server.prompts.media import MixedPrompt
from trioserve.types import Chunk, MediaSource, Prompt, TokenProb
from trioserve.types.events import Candidates

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(st.integers(0, 2**60), TEXTS, TOKENS, st.floats(0, 1))
def test_output(task_id: int, text: str, tokens: list[int], pace: float) -> None:
    said = [Wrote(task_id, text, tuple(tokens), pace, (1, 2))]
    assert read_said(write(said)) == said


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.binary(max_size=5), st.floats(-50, 0))))
def test_candidates(found: list[tuple[int, bytes, float]]) -> None:
    once = {id_: (id_, piece, logprob) for id_, piece, logprob in found}
    candidates = Candidates.of(*(TokenProb(*one) for one in once.values()))
    read = read_value(Raw(write(candidates)), Candidates)
    assert list(read) == list(candidates)


@given(TOKENS)
def test_prompts(tokens: list[int]) -> None:
    prompt = Prompt(tokens)
    assert read_value(Raw(write(PromptFacts.of(prompt))), PromptFacts).prompt == prompt
    assert prompt_in(sent_prompt(prompt)) == tokens


def test_prompts_with_media() -> None:
    mixed = MixedPrompt(["a", MediaSource(data=b"x", param="image"), "b"])
    read = prompt_in(sent_prompt(mixed))
    assert isinstance(read, MixedPrompt) and list(read.parts) == list(mixed.parts)
    with pytest.raises(InvalidRequestError):
        sent_prompt(MixedPrompt([MediaSource(decoded=object(), param="image")]))  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_bytes_are_read_or_are_no_frame(data: bytes) -> None:
    with suppress(FrameError):
        read_said(data)


@pytest.mark.parametrize(
    "kind",
    [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, TrioServeError)
    ],
)
def test_errors(kind: type[TrioServeError]) -> None:
    error = kind.__new__(kind, "It is so.")
    vars(error).update(message="It is so.", param="a", retry_after=1.5)
    said = [Refused(1, SentError.of(error))]
    (read,) = read_said(write(said))  # type: ignore[misc]
    assert isinstance(read, Refused)
    made = read.error.error
    assert type(made) is kind and vars(made) == vars(error)
    assert (made.status, made.type, made.code) == (error.status, error.type, error.code)


@pytest.mark.parametrize("value", ["\ud800", 2**64, -(2**64), {"a": ["\udfff"]}, object()])
def test_values_that_no_message_has(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        write(value)


def test_values_that_are_nested_too_deeply() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        write(deep)


def test_arrays() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    read = read_value(Raw(write(array)), np.ndarray)
    assert read.dtype == np.float32 and (read == array).all()
    for shape in ([2, 4], ["a"], 5, [-1, -1], [2**62, 2]):
        with pytest.raises(FrameError):
            read_value(Raw(write([shape, array.tobytes()])), np.ndarray)


def test_an_answer_is_a_part_of_its_message() -> None:
    said = [Answered(1, write({"a": [1, 2]}))]
    (read,) = read_said(write(said))  # type: ignore[misc]
    assert isinstance(read, Answered)
    assert read_value(read.value, dict[str, list[int]]) == {"a": [1, 2]}


def test_an_order_that_is_none() -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_order(b"nonsense")


def test_a_chunk_keeps_its_candidates() -> None:
    chunk = Chunk(1, "a", (5,))
    assert msgspec.msgpack.decode(write(chunk), type=Chunk) == chunk
