"""Responses while they grow: the response is the same for all splits of the output."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.families import HERMES_THINK
from tests.support.message_writers import WRITERS
from trioserve.api.openai.responses.events import ResponseBuilder, ResponseEvents
from trioserve.api.openai.responses.items import Event
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.parse.parser import message_parser
from trioserve.errors import DeadlineExceededError
from trioserve.server.stream import ChatChunk
from trioserve.testing.vocab import byte_vocab
from trioserve.types import (
    Candidates,
    Finished,
    FinishReason,
    GenerationParams,
    Timings,
    TokenProb,
    TokenProbs,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é b"}}\n</tool_call>'
TEXTS = [
    "Hello, é!",
    "<think>\nA thought.\n</think>\n\nAn answer.",
    f"<think>\nHm, a.\n</think>\n\nWell. {CALL}\n{CALL}",
    f"{CALL}\nAnd a word after it, ar",
    "<think>\nOnly a thought th",
]


def prob(token: int) -> TokenProbs:
    chosen = TokenProb(token, byte_vocab.pieces[token], -0.5)
    return TokenProbs(chosen, Candidates.of(chosen))


class Made:
    """A response, and the events that told of it."""

    def __init__(
        self,
        text: str,
        cuts: list[int],
        reason: FinishReason = FinishReason.EOS,
        *,
        format: ChatFormat = HERMES_THINK,
        prompt: str = "",
    ):
        body = {
            "input": "Hi",
            "tools": [{"type": "function", "name": "f"}],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        }
        wanted = ResponsesRequest.parse(body)
        numbers = iter(range(99))
        parser = message_parser(
            format,
            parse_tools=True,
            prompt_tail=prompt,
            new_id=lambda: f"call_{next(numbers)}",
        )
        self.builder = ResponseBuilder("m", wanted, GenerationParams(), 3)
        self.events: list[Event] = self.builder.begin()
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            tokens = tuple(text[start:end].encode())
            deltas = tuple(parser.feed(text[start:end]))
            self.events += self.builder.add(ChatChunk(deltas, tokens, tuple(map(prob, tokens))))
        self.events += self.builder.add(ChatChunk(tuple(parser.finish()), ()))
        timings = Timings(cache_n=1, prompt_n=2, predicted_n=len(text.encode()) + 1)
        self.events += self.builder.finish(Finished(task_id=1, reason=reason, timings=timings))

    @property
    def response(self) -> dict[str, Any]:
        """Without what differs each time."""
        volatile = ("id", "created_at", "completed_at")
        response = {k: v for k, v in self.builder.response.items() if k not in volatile}
        response["output"] = [{**item, "id": ""} for item in response["output"]]
        return response

    @property
    def types(self) -> list[str]:
        """The types of the events, repeated deltas once."""
        types = [str(event["type"]).removeprefix("response.") for event in self.events]
        return [
            kind
            for kind, before in zip(types, ["", *types], strict=False)
            if kind != before or not kind.endswith("delta")
        ]


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, list[int]]:
    text = draw(st.sampled_from(TEXTS))
    cuts = draw(st.sets(st.integers(1, len(text) - 1)))
    return text, sorted(cuts)


@given(split_texts())
def test_the_events_add_up_to_the_same_response(split: tuple[str, list[int]]) -> None:
    text, cuts = split
    made, whole = Made(text, cuts), Made(text, [])
    assert made.response == whole.response
    assert made.types == whole.types
    done = [e["item"] for e in made.events if e["type"] == "response.output_item.done"]
    assert done == made.builder.response["output"]
    n_reasoning = 0
    for index, item in enumerate(done):
        own = [event for event in made.events if event.get("output_index") == index]
        text = "".join(event.get("delta", "") for event in own)
        if item["type"] == "function_call":
            assert text == item["arguments"] == own[-2]["arguments"]
            continue
        [part] = item["content"]
        assert text == part["text"] == own[-3]["text"]
        logprobs = [one for event in own for one in event.get("logprobs", ()) if "delta" in event]
        assert logprobs == part.get("logprobs", [])
        if item["type"] == "message":  # tokens belong to the text that they made
            assert bytes(byte for one in logprobs for byte in one["bytes"]).decode() == text
        else:
            n_reasoning += len(text.encode())
    details = made.response["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": n_reasoning}


@pytest.mark.parametrize("name", ["glm-4", "gigachat-3", "plain-think", "harmony", "kimi-k3"])
@given(seed=st.integers(0, 999))
@settings(max_examples=10)
def test_streamed_equals_whole_in_other_formats(name: str, seed: int) -> None:
    writer = WRITERS[name]
    calls = [("f", {"a": "b c"}), ("f", {"a": 1})][: writer.most]
    text = writer.write("Hm, a.", "" if writer.bare else "Well, é.", calls)
    dice = random.Random(seed)
    cuts = sorted(dice.sample(range(1, len(text)), dice.randrange(min(20, len(text) - 1))))
    made = Made(text, cuts, format=writer.format, prompt=writer.prompt)
    whole = Made(text, [], format=writer.format, prompt=writer.prompt)
    assert made.response == whole.response
    assert made.types == whole.types


def test_the_order_of_events() -> None:
    text = ["output_item.added", "content_part.added"]
    ends = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert Made(TEXTS[2], []).types == [
        "created",
        "in_progress",
        *text,
        "reasoning_text.delta",
        "reasoning_text.done",
        *ends,
        *text,
        "output_text.delta",
        "output_text.done",
        *ends,
        *call,
        "output_item.done",
        *call,
        "output_item.done",
        "completed",
    ]


def test_an_output_that_was_cut_is_incomplete() -> None:
    made = Made(TEXTS[2][:-12], [], FinishReason.LIMIT)
    response = made.response
    assert response["status"] == "incomplete"
    assert made.builder.response["completed_at"] is None
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed"] * 3 + ["incomplete"]
    assert made.types[-1] == "incomplete"


def test_no_output_has_no_items() -> None:
    made = Made("", [])
    assert made.response["output"] == []
    assert made.types == ["created", "in_progress", "completed"]


def test_an_error_before_the_response_began_is_the_only_event() -> None:
    wanted = ResponsesRequest.parse({"input": "Hi", "stream": True})
    builder = ResponseBuilder("m", wanted, GenerationParams(), 1)
    data = ResponseEvents(builder, "{}").fail(DeadlineExceededError("Too late."))
    assert data.decode() == (
        'event: error\ndata: {"type":"error","sequence_number":0,"code":"deadline_exceeded",'
        '"message":"Too late.","param":null,"error":{"code":"deadline_exceeded",'
        '"message":"Too late.","type":"timeout_error","param":null}}\n\n'
    )


# -- ids


def test_ids_have_their_prefixes() -> None:
    made = Made(TEXTS[2], []).builder.response
    ids = [made["id"], *(item["id"] for item in made["output"])]
    pattern = r"resp_\w{32} rs_\w{32} msg_\w{32} fc_call_0 fc_call_1"
    assert re.fullmatch(pattern, " ".join(ids))
