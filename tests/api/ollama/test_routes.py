"""Ollama's routes for text on the wire: Ollama's client and httpx, over a real socket."""

from __future__ import annotations

import datetime
import json
import threading
import time
from typing import Any

import httpx
import ollama
import pytest
import trio

from tests.support.clients import client_and_service, client_of
from tests.support.http_server import slots_in_use
from tests.support.ollama_api import ASK, WEATHER, lines_in, use_ollama
from tests.support.scripts import HI, answering, endless, noting
from trioserve.api.base.service import Service
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import ByteVocab
from trioserve.types import FimTokens


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


ANSWERS = {
    "text": "Hello you",
    "nothing": "",
    "thinking": "<think>\nLet me see.\n</think>\n\nIt rains.",
    "only thinking": "<think>\nLet me see.",
    "a call": call("Paris"),
    "calls": f"<think>\nTwo.\n</think>\n\nWell.\n{call('Paris')}\n{call('Rome')}",
    "text after a call": f"Well.\n{call('Paris')}\nThere.",
}

DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def check_times(part: dict[str, Any]) -> None:
    """Take the moments and lengths of time from a last part; they must make sense."""
    moment = datetime.datetime.fromisoformat(part.pop("created_at"))
    assert abs(moment.timestamp() - time.time()) < 60
    lengths = {name: part.pop(name) for name in DURATIONS}
    assert all(isinstance(each, int) and each > 0 for each in lengths.values())
    assert max(lengths.values()) == lengths["total_duration"] < 60e9


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask, and take the whole answer, which must be well."""
    answer = await client.post(path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    return dict(answer.json())


async def post(backend: ScriptedBackend, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask a server that is asked once."""
    async with client_of(backend) as client:
        return await ask(client, path, body)


# -- chat


async def test_a_whole_chat() -> None:
    data = await post(answering("Hello you"), "/api/chat", ASK)
    check_times(data)
    assert data.pop("prompt_eval_count") > 2
    assert data == {
        "model": "scripted",
        "message": {"role": "assistant", "content": "Hello you"},
        "done": True,
        "done_reason": "stop",
        "eval_count": 10,
    }


async def test_the_lines_of_a_stream() -> None:
    async with client_of(answering("Hey")) as client:
        answer = await client.post("/api/chat", json=ASK)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    *parts, last = lines_in(answer.text)
    check_times(last)
    assert last.pop("prompt_eval_count") > 2
    assert last == {
        "model": "scripted",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "eval_count": 4,
    }
    assert "".join(part["message"]["content"] for part in parts) == "Hey"
    for part in parts:
        assert part.pop("created_at")
        assert part["message"].pop("content")
        assert part == {"model": "scripted", "message": {"role": "assistant"}, "done": False}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_adds_up_to_the_whole_answer(name: str) -> None:
    def use(client: ollama.Client) -> None:
        asked = ASK | {"tools": [WEATHER]}
        whole = client.chat(**asked)
        *parts, last = client.chat(**asked, stream=True)
        messages = [part.message for part in (*parts, last)]
        assert "".join(one.content for one in messages) == whole.message.content
        thinking = "".join(one.thinking or "" for one in messages)
        assert thinking == (whole.message.thinking or "")
        calls = [each for one in messages for each in one.tool_calls or ()]
        assert calls == (whole.message.tool_calls or [])
        assert [each.function.arguments["city"] for each in calls] == [
            city for city in ("Paris", "Rome") if city in ANSWERS[name]
        ]
        assert (last.done, last.done_reason) == (whole.done, whole.done_reason) == (True, "stop")
        assert last.eval_count == whole.eval_count
        assert last.prompt_eval_count == whole.prompt_eval_count
        assert not any(part.done for part in parts)

    await use_ollama(answering(ANSWERS[name]), use)


@pytest.mark.parametrize(
    ("options", "said", "reason"),
    [
        ({}, "Hello you", "stop"),
        ({"stop": ["x", " y"]}, "Hello", "stop"),
        ({"num_predict": 5}, "Hello", "length"),
        ({"num_predict": -2}, "Hello you", "stop"),
    ],
)
async def test_options_end_the_answer(options: dict[str, Any], said: str, reason: str) -> None:
    def use(client: ollama.Client) -> None:
        chat = client.chat(**ASK, options=options)
        generated = client.generate("scripted", "Hi", options=options)
        assert (chat.message.content, chat.done_reason) == (said, reason)
        assert (generated.response, generated.done_reason) == (said, reason)

    await use_ollama(answering("Hello you"), use)


async def test_a_call_that_was_cut_short_has_what_was_complete() -> None:
    cut = await post(
        answering(call("Paris")),
        "/api/chat",
        ASK | {"tools": [WEATHER], "options": {"num_predict": 58}},
    )
    (one,) = cut["message"]["tool_calls"]
    assert one.pop("id")
    assert one["function"]["name"] == "weather"
    assert "Paris".startswith(one["function"]["arguments"].get("city", ""))
    assert cut["done_reason"] == "length"


async def test_a_loop_of_tools() -> None:
    """The client asks, calls, and asks again with the results, until there is an answer."""
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        done = "<tool_response>" in prompt
        return "Rain in Paris, sun in Rome." if done else call("Paris") + "\n" + call("Rome")

    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """
        return f"Weather of {city}"

    def use(client: ollama.Client) -> None:
        messages: list[Any] = list(HI)
        while True:
            message = client.chat("scripted", messages, tools=[weather]).message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [
                {
                    "role": "tool",
                    "tool_name": each.function.name,
                    "content": weather(**each.function.arguments),
                }
                for each in message.tool_calls
            ]
        assert message.content == "Rain in Paris, sun in Rome."

    await use_ollama(answering(script), use)
    assert "<tool_response>\nWeather of Paris\n" in prompts[-1]
    assert "<tool_response>\nWeather of Rome\n" in prompts[-1]


async def test_structured_output() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    async with client_of(answering('{"a":5}')) as client:
        for format_ in (schema, "json"):
            data = await ask(client, "/api/chat", ASK | {"format": format_})
            assert json.loads(data["message"]["content"]) == {"a": 5}
        data = await ask(client, "/api/generate", {"prompt": "Hi", "format": schema})
        assert json.loads(data["response"]) == {"a": 5}
    async with client_of(answering("no JSON")) as client:
        for path in ("/api/chat", "/api/generate"):
            body = ASK | {"prompt": "Hi", "format": schema, "stream": False}
            answer = await client.post(path, json=body)
            assert "does not follow the grammar" in answer.json()["error"]


async def test_the_last_message_is_continued() -> None:
    backend, prompts = noting("lo you")
    begun = [*HI, {"role": "assistant", "content": "Hel"}]
    data = await post(backend, "/api/chat", {"messages": begun})
    assert data["message"]["content"] == "lo you"
    assert prompts[-1].endswith("Hel")


@pytest.mark.parametrize("stream", [True, False])
async def test_the_probabilities_of_tokens(stream: bool) -> None:
    asked = ASK | {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    async with client_of(answering("Hey you")) as client:
        answer = await client.post("/api/chat", json={**asked, "stream": stream})
        plain = await client.post("/api/chat", json=asked | {"top_logprobs": None})
    found = [each for part in lines_in(f"{answer.text.rstrip()}\n") for each in _logprobs(part)]
    assert [each["token"] for each in found] == ["H", "e", "y"]
    for each in found:
        assert each["logprob"] <= 0
        assert each["bytes"] == list(each["token"].encode())
        assert len(each["top_logprobs"]) == 1  # a script is sure of everything
    assert [each["top_logprobs"] for part in lines_in(plain.text) for each in _logprobs(part)] == [
        []
    ] * 3


def _logprobs(part: dict[str, Any]) -> list[dict[str, Any]]:
    return list(part.get("logprobs", ()))


# -- generate


async def test_a_prompt_is_answered_as_a_chat() -> None:
    backend, prompts = noting("<think>\nHm.\n</think>\n\nHello you")
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    async with client_of(backend) as client:
        data = await ask(client, "/api/generate", {"prompt": "Hi", "system": "Be brief."})
        await ask(client, "/api/chat", {"messages": messages})
    assert prompts[0] == prompts[1]
    check_times(data)
    assert data.pop("prompt_eval_count") == len(prompts[0])
    assert data.pop("eval_count") > 9
    assert data == {
        "model": "scripted",
        "response": "Hello you",
        "thinking": "Hm.",
        "done": True,
        "done_reason": "stop",
    }


async def test_the_lines_of_a_generated_stream() -> None:
    def use(client: ollama.Client) -> None:
        *parts, last = client.generate("scripted", "Hi", stream=True)
        assert "".join(part.thinking or "" for part in parts) == "Let me see."
        assert "".join(part.response for part in parts) == "It rains."
        assert last.done and last.response == ""
        assert last.eval_count and last.eval_duration

    await use_ollama(answering(ANSWERS["thinking"]), use)


async def test_a_raw_prompt_is_continued_as_it_is() -> None:
    backend, prompts = noting("<think>x</think>")
    async with client_of(backend) as client:
        for stream in (True, False):
            body = {"prompt": "Once", "raw": True, "stream": stream}
            answer = await client.post("/api/generate", json=body)
            parts = lines_in(f"{answer.text.rstrip()}\n")
            assert "".join(part["response"] for part in parts) == "<think>x</think>"
    assert prompts == ["Once", "Once"]


class GapVocab(ByteVocab):
    fim = FimTokens(prefix=1, suffix=2, middle=3)


async def test_the_gap_before_a_suffix() -> None:
    async with client_of(answering("gap")) as client:
        answer = await client.post("/api/generate", json={"prompt": "a", "suffix": "b"})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("'suffix' needs a model that fills gaps")
    backend, prompts = noting("gap")
    backend.vocab = GapVocab()
    async with client_of(backend) as client:
        for prompt in ("before", ""):
            body = {"prompt": prompt, "suffix": "after", "options": {"num_predict": 9}}
            assert (await ask(client, "/api/generate", body))["response"] == "gap"
    assert prompts == ["\x01before\x02after\x03", "\x01\x02after\x03"]


@pytest.mark.parametrize(
    ("path", "body", "empty"),
    [
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {"prompt": ""}, {"response": ""}),
    ],
)
async def test_nothing_to_answer_loads_the_model(
    path: str, body: dict[str, Any], empty: dict[str, Any]
) -> None:
    backend = answering("Hello")
    async with client_of(backend) as client:
        answer = await client.post(path, json=body | {"model": "scripted"})
    data = answer.json()
    assert data.pop("created_at")
    assert data == {"model": "scripted", **empty, "done": True, "done_reason": "load"}
    assert backend.n_decodes == 0


# -- what the model and the server cannot do


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"options": {"num_ctx": 4097}},
            "'options.num_ctx' is 4097, and a request has a context of 4096 tokens here; the flag "
            "--ctx-size sets it.",
        ),
        (
            {"shift": True},
            "'shift' is not supported with this value; the flag --context-shift sets it for all "
            "requests.",
        ),
        (
            {"options": {"num_thread": 4}},
            "'options.num_thread' is not supported with this value; the flag --threads sets it for "
            "all requests.",
        ),
        ({"options": {"top_p": -1}}, None),
    ],
)
async def test_a_field_that_cannot_be_honoured(fields: dict[str, Any], message: str) -> None:
    async with client_of(answering("Hi")) as client:
        for path, body in (("/api/chat", ASK), ("/api/generate", {"prompt": "Hi"})):
            answer = await client.post(path, json=body | fields)
            assert answer.status_code == 400
            assert set(answer.json()) == {"error"}
            assert answer.json()["error"] == message or "'top_p'" in answer.json()["error"]
        fine = {"options": {"num_ctx": 4096}, "shift": False}
        assert (await client.post("/api/chat", json=ASK | fine)).status_code == 200


async def test_a_model_that_cannot_think() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with client_of(answering("Hi", chat_template=plain)) as client:
        for think in (True, "high"):
            answer = await client.post("/api/chat", json=ASK | {"think": think})
            assert answer.status_code == 400
            assert "'scripted' does not support thinking" in answer.json()["error"]
        for think in (False, None):
            answer = await client.post("/api/chat", json=ASK | {"think": think})
            assert answer.status_code == 200


async def test_thinking_is_switched_on_and_off() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}|"
        "{{ '<think>' if enable_thinking else '</think>' }}|{{ reasoning_effort }}"
    )
    backend, prompts = noting("Hi", chat_template=template)
    async with client_of(backend) as client:
        for think in (True, False, "low"):
            await ask(client, "/api/chat", ASK | {"think": think})
    assert [each.split("|")[1:] for each in prompts] == [
        ["<think>", ""],
        ["</think>", ""],
        ["<think>", "low"],
    ]


# -- life


async def test_silence_is_filled_with_empty_parts() -> None:
    go_on = threading.Event()
    backend = answering("Hi")
    backend.on_decode = lambda backend: go_on.wait()
    lines: list[dict[str, Any]] = []
    try:
        async with (
            client_of(backend) as client,
            client.stream("POST", "/api/chat", json=ASK | {"sse_ping_interval": 0.1}) as answer,
        ):
            async for line in answer.aiter_lines():
                lines.append(json.loads(line))
                if len(lines) == 3:
                    go_on.set()
    finally:
        go_on.set()
    for each in lines[:3]:
        assert each.pop("created_at")
        assert each == {
            "model": "scripted",
            "message": {"role": "assistant", "content": ""},
            "done": False,
        }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"), [("/api/chat", ASK), ("/api/generate", {"prompt": "Hi", "raw": True})]
)
async def test_a_client_that_leaves_frees_its_slot(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async with client_and_service(endless()) as (client, service):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, client, path, body | {"stream": stream})
            await _until_in_use(service, 1)
            nursery.cancel_scope.cancel()
        await _until_in_use(service, 0)


async def _read(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    async with client.stream("POST", path, json=body) as answer:
        async for _ in answer.aiter_lines():
            pass


async def _until_in_use(service: Service, n_slots: int) -> None:
    with trio.fail_after(60):
        while await slots_in_use(service) != n_slots:
            await trio.sleep(0.01)
