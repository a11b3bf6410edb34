"""Scores of a prompt: `echo` with `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import trio

from tests.support.clients import client_of, client_of_app, error_body, events_in, use_openai
from tests.support.plain_loop import EXACT, plain_loop
from tests.support.scripts import HI
from trioserve.app import create_app
from trioserve.chat.markers import media_marker
from trioserve.config import Config
from trioserve.models import BUNDLED
from trioserve.testing import ScriptedBackend

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
#: The most that the order of sums changes a score: it depends on the shape of a batch.
CLOSE = 0.1


def scripted(reply: str = "Yes.") -> ScriptedBackend:
    return ScriptedBackend(lambda _: reply, n_slots=3)


def score(text: str, n: int) -> float:
    """The score that `ScriptedBackend` gives the n-th byte of a text."""
    return -(n + text.encode()[n] / 256)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(scripted()) as client:
        yield client


async def test_openai_s_client_echoes_a_prompt_with_its_scores() -> None:
    def ask(sdk: openai.OpenAI) -> None:
        answer = sdk.completions.create(
            model="any", prompt="Hello", echo=True, logprobs=1, max_tokens=2
        )
        (choice,) = answer.choices
        found = choice.logprobs
        assert choice.text == "HelloYe" and found is not None
        assert found.tokens == ["H", "e", "l", "l", "o", "Y", "e"]
        assert found.text_offset == [*range(7)]
        assert found.token_logprobs is not None and found.top_logprobs is not None
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1:] == [score("Hello", n) for n in range(1, 5)] + [0, 0]
        # Of the prompt, the token itself is beside the candidates, and of the output it is one.
        assert [len(each) for each in found.top_logprobs[1:]] == [2] * 4 + [1] * 2
        alone = sdk.completions.create(
            model="any", prompt="Hello", echo=True, logprobs=3, max_tokens=0
        ).choices[0]
        assert (alone.text, alone.finish_reason) == ("Hello", "length")
        assert alone.logprobs is not None
        assert alone.logprobs.tokens == ["H", "e", "l", "l", "o"]
        assert [each and len(each) for each in alone.logprobs.top_logprobs or ()] == [
            None,
            *[4] * 4,
        ]

    await use_openai(scripted(), ask)


async def test_all_tokens_of_the_output_are_there(client: httpx.AsyncClient) -> None:
    """Clients cut as many tokens off the end as they have asked for."""
    body = {"prompt": "Hi", "echo": True, "logprobs": 1, "max_tokens": 9}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["text"] == "HiYes."
    assert choice["logprobs"]["tokens"] == ["H", "i", "Y", "e", "s", ".", ""]  # the last one is EOS
    body["stop"] = "s"
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert choice["text"] == "HiYe"
    assert choice["logprobs"]["tokens"] == ["H", "i", "Y", "e"]


async def test_several_prompts_and_outputs(client: httpx.AsyncClient) -> None:
    prompts: list[Any] = ["One", "Another", [72, 105]]
    body = {
        "prompt": prompts,
        "n": 2,
        "best_of": 3,
        "echo": True,
        "logprobs": 2,
        "max_tokens": 1,
        "prompt_logprobs": 1,
    }
    choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    texts = ["One", "One", "Another", "Another", "Hi", "Hi"]
    assert [choice["text"] for choice in choices] == [f"{text}Y" for text in texts]
    for text, choice in zip(texts, choices, strict=True):
        expected = [score(text, n) for n in range(1, len(text))]
        assert choice["logprobs"]["token_logprobs"][1:-1] == expected
        assert len(choice["logprobs"]["top_logprobs"][1]) == 3
        assert len(choice["prompt_logprobs"]) == len(text)
        assert len(choice["prompt_logprobs"][1]) == 2  # the token, and one candidate


@pytest.mark.parametrize("echo", [False, True])
async def test_0_logprobs_report_the_tokens_alone(client: httpx.AsyncClient, echo: bool) -> None:
    body = {"prompt": "Hi", "echo": echo, "logprobs": 0, "max_tokens": 2}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    found = choice["logprobs"]
    tokens = ["H", "i", "Y", "e"] if echo else ["Y", "e"]
    figures = [None, score("Hi", 1), 0, 0] if echo else [0, 0]
    assert (found["tokens"], found["token_logprobs"]) == (tokens, figures)
    assert found["top_logprobs"] == [
        None if figure is None else {token: figure}
        for token, figure in zip(tokens, figures, strict=True)
    ]
    assert [each["top_logprobs"] for each in found["content"]] == [[], []]
    answer = await client.post(COMPLETIONS, json=body | {"stream": True})
    written = [
        part
        for event in events_in(answer.text)
        if event != "[DONE]"
        for part in (event["choices"][0]["logprobs"] or {}).get("top_logprobs", ())
    ]
    assert written == found["top_logprobs"]
    no_probs = {"prompt": "Hi", "n_probs": 0, "max_tokens": 1}
    assert (await client.post(COMPLETIONS, json=no_probs)).json()["choices"][0]["logprobs"] is None


async def test_a_stream_begins_with_the_prompt_and_its_scores(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 2}
    (whole,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    for max_tokens in (2, 0):
        answer = await client.post(
            COMPLETIONS, json=body | {"stream": True, "max_tokens": max_tokens}
        )
        choices = [event["choices"][0] for event in events_in(answer.text) if event != "[DONE]"]
        written = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        joined = {
            name: [item for one in written for item in one[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        n = 5 + max_tokens
        assert "".join(choice["text"] for choice in choices) == whole["text"][:n]
        assert joined == {name: whole["logprobs"][name][:n] for name in joined}
        assert choices[0]["text"] == "Hello"
        assert choices[-1]["finish_reason"] == "length"


async def test_prompt_logprobs_in_vllm_s_form(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Hi!", "prompt_logprobs": 0, "max_tokens": 1}
    (choice,) = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("Y", None)
    assert choice["prompt_logprobs"] == [
        None,
        {"105": {"logprob": score("Hi!", 1), "rank": 1, "decoded_token": "i"}},
        {"33": {"logprob": score("Hi!", 2), "rank": 1, "decoded_token": "!"}},
    ]
    answer = (await client.post(CHATS, json={"messages": HI, "prompt_logprobs": 2})).json()
    assert "prompt_logprobs" not in answer["choices"][0]
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == answer["usage"]["prompt_tokens"] - 1
    for each in others:
        chosen, *candidates = each.values()
        assert chosen["rank"] == 3
        assert [one["rank"] for one in candidates] == [1, 2]
    without = (await client.post(CHATS, json={"messages": HI})).json()
    assert "prompt_logprobs" not in without


LIMIT = "must be at most 20, which --max-logprobs sets."
UNSUPPORTED = "is not supported with this value; leave it out."
#: The least that a route needs.
ROUTES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHATS: {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/completion": {"prompt": "Hi"},
}
ECHO = {"echo": True, "logprobs": 1}
MEDIA = {"prompt_string": media_marker(), "multimodal_data": ["aGk="]}
NO_MEDIA = "with 'logprobs' takes prompts without media."
RUN = "trioserve_run_tools"


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "must be between 0 and 1024."),
        (COMPLETIONS, {"prompt_logprobs": "1"}, "prompt_logprobs", "must be an integer."),
        (COMPLETIONS, {"prompt_logprobs": True}, "prompt_logprobs", "must be an integer."),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", LIMIT),
        (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs", LIMIT),
        (COMPLETIONS, {"echo": "yes"}, "echo", "must be true or false."),
        (COMPLETIONS, {"prompt_logprobs": 1}, "stream", None),
        (COMPLETIONS, {"echo": True, "suffix": "b"}, "echo", "and 'suffix' exclude each other."),
        (
            COMPLETIONS,
            ECHO | {"post_sampling_probs": True},
            "post_sampling_probs",
            "has no meaning for the tokens of the prompt, which 'echo' adds.",
        ),
        (
            COMPLETIONS,
            ECHO | {"prompt": MEDIA},
            "echo",
            "with 'logprobs' takes prompts without media.",
        ),
        (CHATS, {"prompt_logprobs": 21}, "prompt_logprobs", LIMIT),
        (CHATS, {"prompt_logprobs": 0}, "stream", None),
        (CHATS, {"prompt_logprobs": 0}, RUN, None),
        ("/v1/responses", {"prompt_logprobs": 1}, "prompt_logprobs", UNSUPPORTED),
        ("/completion", {"prompt_logprobs": 1}, "prompt_logprobs", UNSUPPORTED),
    ],
)
async def test_invalid_fields_are_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, problem: str | None
) -> None:
    if problem is None:  # it and the other field exclude each other
        body, problem = {**body, param: True}, f"and '{param}' exclude each other."
        param = "prompt_logprobs"
    answer = await client.post(path, json=ROUTES[path] | body)
    assert answer.status_code == 400
    assert answer.json() == error_body(f"'{param}' {problem}", param)


async def test_scores_count_as_memory_of_the_request() -> None:
    async with client_of(scripted(), max_request_memory=2**20) as client:
        body = {"prompt": "a" * 900, "max_tokens": 1}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        answer = await client.post(COMPLETIONS, json=body | {"prompt_logprobs": 20})
        assert answer.status_code == 413
        assert (await client.post(COMPLETIONS, json=body | {"prompt_logprobs": 1})).is_success


# -- with llama.cpp


STORY = "Once upon a time, there was a little girl named Lily. " * 6
#: Seconds that a request may take on a machine with other work.
PATIENCE = 300
ENDS = ["She loved to play.", "He was a big dog.", "Ünïcödé 😀 too."]


def exact(**config: Any) -> Any:
    return create_app(Config(threads=1, **EXACT, **config))


def scores_of(prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    with plain_loop(BUNDLED, exact=True) as loop:
        return [loop.scores(prompt) for prompt in prompts]


async def test_the_text_and_the_scores_fit() -> None:
    texts = [STORY + end for end in ENDS]
    async with client_of_app(exact()) as client:
        tokenize = partial(client.post, "/tokenize")
        prompts = [(await tokenize(json={"prompt": text})).json()["tokens"] for text in texts]
        body = {"prompt": texts, "echo": True, "logprobs": 1, "max_tokens": 0}
        choices = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        body |= {"prompt": prompts}
        by_ids = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    for text, choice, other, expected in zip(
        texts, choices, by_ids, scores_of(prompts), strict=True
    ):
        assert choice["text"] == text
        found = choice["logprobs"]
        assert found["token_logprobs"][1:] == pytest.approx(expected, abs=CLOSE)
        assert other["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=CLOSE)
        assert other["text"].endswith(text)
        for token, offset in zip(found["tokens"][2:], found["text_offset"][2:], strict=True):
            if "�" not in token and offset < len(STORY):
                assert text[offset:].startswith(token)


@pytest.mark.system
async def test_64_requests_at_once_beside_streams() -> None:
    """The four choices of 16 questions are scored while chats stream."""
    ends = ("cat.", "dog.", "hat.", "map.")
    texts = [f"{STORY}Question {i}: a {end}" for i in range(16) for end in ends]
    found: dict[str, list[float]] = {}
    begun = [trio.Event(), trio.Event()]
    n_generated = [0, 0]
    async with client_of_app(exact(parallel=4, ctx_size=8192)) as client:

        async def stream(index: int) -> None:
            body = {
                "prompt": "A boy named Tim",
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": 500,
                "ignore_eos": True,
                "seed": index,
            }
            async with client.stream("POST", COMPLETIONS, json=body, timeout=PATIENCE) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        begun[index].set()
                        usage = json.loads(line[len("data: ") :]).get("usage") or {}
                        n_generated[index] = usage.get("completion_tokens", 0)

        async def ask(text: str) -> None:
            body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
            answer = await client.post(COMPLETIONS, json=body, timeout=PATIENCE)
            assert answer.status_code == 200, answer.text
            found[text] = answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:-1]

        async with trio.open_nursery() as nursery:
            for index, event in enumerate(begun):
                nursery.start_soon(stream, index)
                await event.wait()
            for text in texts:
                nursery.start_soon(ask, text)
        tokenize = partial(client.post, "/tokenize")
        prompts = [(await tokenize(json={"prompt": text})).json()["tokens"] for text in texts]
    assert n_generated == [500, 500]
    for text, expected in zip(texts, scores_of(prompts), strict=True):
        assert found[text] == pytest.approx(expected, abs=CLOSE)
