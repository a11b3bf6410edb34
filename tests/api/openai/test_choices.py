"""Several outputs of one prompt: `n`, `n_cmpl` and `best_of`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
import structlog
import trio

from tests.support.clients import client_of, events_in, use_openai
from tests.support.http_server import connected, post, serving_script, slots_in_use
from tests.support.scripts import HI
from trioserve.api.base.usage import usage_of
from trioserve.server.generation.text import best_of, copies_of
from trioserve.server.stream import Completion
from trioserve.testing import ScriptedBackend
from trioserve.types import (
    Candidates,
    Finished,
    FinishReason,
    GenerationParams,
    SamplingParams,
    Timings,
    TokenProb,
    TokenProbs,
)


def three_slots() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: "Yes", n_slots=3)


# -- chats


async def test_the_choices_of_a_chat() -> None:
    async with client_of(three_slots()) as client:
        one = (await client.post("/v1/chat/completions", json={"messages": HI})).json()
        body = {"messages": HI, "n": 3, "cache_prompt": False}
        data = (await client.post("/v1/chat/completions", json=body)).json()
    message = {"role": "assistant", "content": "Yes", "refusal": None}
    assert data["choices"] == [
        {"finish_reason": "stop", "index": index, "message": message, "logprobs": None}
        for index in range(3)
    ]
    n_prompt = one["usage"]["prompt_tokens"]
    assert data["usage"] == {
        "completion_tokens": 12,
        "prompt_tokens": n_prompt,  # once, as in OpenAI's API
        "total_tokens": n_prompt + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_openai_s_client_sees_more_choices_than_there_are_slots() -> None:
    def use(client: openai.OpenAI) -> None:
        chat = client.chat.completions.create(model="m", messages=HI, n=8)
        assert [choice.message.content for choice in chat.choices] == ["Yes"] * 8
        with client.chat.completions.stream(model="m", messages=HI, n=8) as stream:
            stream.until_done()
            final = stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["Yes"] * 8
        best = client.completions.create(model="m", prompt=["a", "b"], n=4, best_of=5)
        assert [(choice.index, choice.text) for choice in best.choices] == [
            (index, "Yes") for index in range(8)
        ]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=HI, n=257)
        assert caught.value.param == "n"

    await use_openai(three_slots(), use)


async def test_the_choices_of_a_streamed_chat() -> None:
    async with client_of(three_slots()) as client:
        for include_usage in (True, False):
            options = {"stream": True, "stream_options": {"include_usage": include_usage}}
            body = {"messages": HI, "n": 2, **options}
            check_stream(await client.post("/v1/chat/completions", json=body), include_usage)


def check_stream(answer: httpx.Response, include_usage: bool) -> None:
    events = events_in(answer.text)
    assert [event["choices"][0]["index"] for event in events[:2]] == [0, 1]  # for OpenAI's client
    assert answer.text.endswith("data: [DONE]\n\n")
    texts, roles, reasons = ["", ""], Counter[int](), {}
    for event in events:
        for choice in event["choices"]:
            index, delta = choice["index"], choice["delta"]
            texts[index] += delta.get("content") or ""
            roles[index] += "role" in delta
            reasons[index] = choice["finish_reason"]
    assert texts == ["Yes", "Yes"]
    assert roles == {0: 1, 1: 1}
    assert reasons == {0: "stop", 1: "stop"}
    usages = [event["usage"] for event in events if "usage" in event]
    assert [usage["completion_tokens"] for usage in usages] == [8] * include_usage
    assert (events[-1]["choices"] == []) == include_usage


@pytest.mark.system
async def test_all_choices_end_with_the_connection() -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 900, n_slots=3)
    body = json.dumps({"messages": HI, "n": 3, "stream": True}).encode()
    with structlog.testing.capture_logs() as logs:
        async with serving_script(backend) as (url, service):
            async with connected(url) as stream:
                await stream.send_all(post("/v1/chat/completions", body))
                await stream.receive_some()
            while await slots_in_use(service):
                await trio.lowlevel.checkpoint()
    ended = [line for line in logs if line["event"] != "request started"]
    assert [line.get("cancelled") for line in ended if "task" in line] == ["disconnect"] * 3


# -- text


async def test_each_copy_has_a_seed_of_its_own() -> None:
    body = {
        "prompt": ["ab", "cd"],
        "n_cmpl": 2,
        "seed": 7,
        "response_fields": ["index", "content", "generation_settings/seed"],
    }
    async with client_of(ScriptedBackend(n_slots=3)) as client:
        data = (await client.post("/completion", json=body)).json()
        streamed = await client.post("/completion", json=body | {"stream": True})
    expected = [
        {"index": i, "content": text, "generation_settings/seed": seed}
        for i, (text, seed) in enumerate([("AB", 7), ("AB", 8), ("CD", 7), ("CD", 8)])
    ]
    assert data == expected
    texts = Counter[int]()
    for event in events_in(streamed.text, done=False):
        texts[event["index"]] += len(event["content"])
    assert texts == {0: 2, 1: 2, 2: 2, 3: 2}


def test_seeds_count_up_and_the_first_copy_has_the_slot() -> None:
    options = GenerationParams(sampling=SamplingParams(seed=2**32 - 2), id_slot=1)
    copies = copies_of(options, 3)
    assert [copy.sampling.seed for copy in copies] == [2**32 - 2, 2**32 - 1, 0]
    assert [copy.id_slot for copy in copies] == [1, -1, -1]
    assert {copy.sampling.seed for copy in copies_of(GenerationParams(), 3)} == {-1}


async def test_usage_of_several_prompts_and_copies() -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "cache_prompt": False}
    async with client_of(ScriptedBackend(n_slots=2)) as client:
        data = (await client.post("/v1/completions", json=body)).json()
        streamed = await client.post(
            "/v1/completions",
            json=body | {"stream": True, "stream_options": {"include_usage": True}},
        )
    assert [choice["text"] for choice in data["choices"]] == ["AB", "AB", "C", "C"]
    assert data["usage"]["prompt_tokens"] == 3
    assert data["usage"]["completion_tokens"] == 10
    assert events_in(streamed.text)[-1]["usage"] == data["usage"]


def test_a_prompt_counts_as_cached_only_if_no_output_has_computed_it() -> None:
    values = [Timings(cache_n=n, predicted_n=1) for n in (8, 0, 8, 3, 9, 9)]
    usage = usage_of(20, values, copies=3)
    assert usage.prompt_tokens_details.cached_tokens == 0 + 3
    assert usage.total_tokens == 26


# -- the best


def completion(text: str, *logprobs: float) -> Completion:
    chosen = [TokenProb(i, b"", logprob) for i, logprob in enumerate(logprobs)]
    return Completion(
        text=text,
        tokens=tuple(range(len(logprobs))),
        probs=tuple(TokenProbs(each, Candidates.of()) for each in chosen),
        prompt=(1,),
        finished=Finished(task_id=1, reason=FinishReason.EOS, timings=Timings()),
    )


def test_the_best_outputs_have_the_most_probable_tokens() -> None:
    a, b, c = completion("a", -2.0), completion("b", -1.0, -1.5), completion("c", -3.0, -0.1)
    nothing = completion("")
    assert best_of([a, b, c], 3, 1) == [b]
    assert best_of([a, b, c], 3, 2) == [b, c]
    assert best_of([a, nothing, nothing, b], 2, 1) == [a, b]
    assert best_of([a, b], 1, 1) == [a, b]


async def test_best_of_reports_no_more_than_was_asked_for() -> None:
    async with client_of(three_slots()) as client:
        for logprobs in (None, 1):
            body = {"prompt": "ab", "best_of": 3, "logprobs": logprobs}
            data = (await client.post("/v1/completions", json=body)).json()
            (choice,) = data["choices"]
            assert choice["text"] == "Yes"
            assert (choice["logprobs"] is None) == (logprobs is None)
            assert data["usage"]["completion_tokens"] == 12  # of all that were made


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 257}, "n"),
    ({"n": 0}, "n"),
    ({"n_cmpl": -1}, "n_cmpl"),
    ({"best_of": 257}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 2, "post_sampling_probs": True}, "best_of"),
    ({"echo": True, "suffix": "b"}, "echo"),
    ({"suffix": "b"}, "suffix"),  # the vocabulary has no tokens for it
]


async def test_bad_numbers_name_the_field() -> None:
    async with client_of(three_slots()) as client:
        for fields, param in BAD:
            answer = await client.post("/v1/completions", json={"prompt": "a"} | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
