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

from tests.support.clients import client_of
from tests.support.ollama_api import ASK, WEATHER, lines_in, use_ollama
from tests.support.scripts import HI, answering, noting
from tests.support.tool_calls import ANSWERS, weather_call
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import ByteVocab
from trioserve.types import FimTokens

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


async def test_a_whole_chat_and_the_lines_of_a_stream() -> None:
    async with client_of(answering("Hello you")) as client:
        whole = await ask(client, "/api/chat", ASK)
        answer = await client.post("/api/chat", json=ASK)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    *parts, last = lines_in(answer.text)
    for end, said in ((whole, "Hello you"), (last, "")):
        check_times(end)
        assert end.pop("prompt_eval_count") > 2
        assert end == {
            "model": "scripted",
            "message": {"role": "assistant", "content": said},
            "done": True,
            "done_reason": "stop",
            "eval_count": 10,
        }
    assert "".join(part["message"]["content"] for part in parts) == "Hello you"
    for part in parts:
        assert part.pop("created_at")
        assert part["message"].pop("content")
        assert part == {"model": "scripted", "message": {"role": "assistant"}, "done": False}


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    def use(client: ollama.Client) -> None:
        for name, said in ANSWERS.items():
            asked = ASK | {"tools": [WEATHER], "messages": [{"role": "user", "content": name}]}
            whole = client.chat(**asked)
            *parts, last = client.chat(**asked, stream=True)
            messages = [part.message for part in (*parts, last)]
            assert "".join(one.content for one in messages) == whole.message.content
            thinking = "".join(one.thinking or "" for one in messages)
            assert thinking == (whole.message.thinking or "")
            calls = [each for one in messages for each in one.tool_calls or ()]
            assert calls == (whole.message.tool_calls or [])
            assert [each.function.arguments["city"] for each in calls] == [
                city for city in ("Paris", "Rome") if city in said
            ]
            ends = [(one.done, one.done_reason) for one in (last, whole)]
            assert ends == [(True, "stop")] * 2
            assert last.eval_count == whole.eval_count
            assert last.prompt_eval_count == whole.prompt_eval_count
            assert not any(part.done for part in parts)

    def script(prompt: str) -> str:
        last = prompt.rpartition("<|im_start|>user\n")[2]
        return ANSWERS[last.partition("<|im_end|>")[0]]

    await use_ollama(answering(script), use)


async def test_options_end_the_answer() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "Hello you", "stop"),
        ({"stop": ["x", " y"]}, "Hello", "stop"),
        ({"num_predict": 5}, "Hello", "length"),
        ({"num_predict": -2}, "Hello you", "stop"),
    ]

    def use(client: ollama.Client) -> None:
        for options, said, reason in cases:
            chat = client.chat(**ASK, options=options)
            generated = client.generate("scripted", "Hi", options=options)
            assert (chat.message.content, chat.done_reason) == (said, reason)
            assert (generated.response, generated.done_reason) == (said, reason)

    await use_ollama(answering("Hello you"), use)


async def test_a_call_that_was_cut_short_has_what_was_complete() -> None:
    cut = await post(
        answering(weather_call("Paris")),
        "/api/chat",
        ASK | {"tools": [WEATHER], "options": {"num_predict": 58}},
    )
    (one,) = cut["message"]["tool_calls"]
    assert one.pop("id")
    assert one["function"]["name"] == "weather"
    assert "Paris".startswith(one["function"]["arguments"].get("city", ""))
    assert cut["done_reason"] == "length"


async def test_the_results_of_tools_go_back() -> None:
    backend, prompts = noting(f"{weather_call('Paris')}\n{weather_call('Rome')}")

    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """
        return f"Weather of {city}"

    def use(client: ollama.Client) -> None:
        made = client.chat("scripted", HI, tools=[weather]).message
        calls = [each.function for each in made.tool_calls or ()]
        results = [
            {"role": "tool", "tool_name": each.name, "content": weather(**each.arguments)}
            for each in calls
        ]
        client.chat("scripted", [*HI, made, *results], tools=[weather])

    await use_ollama(backend, use)
    for city in ("Paris", "Rome"):
        assert f"<tool_response>\nWeather of {city}\n" in prompts[-1]


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


async def test_the_probabilities_of_tokens() -> None:
    asked = ASK | {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    async with client_of(answering("Hey you")) as client:
        for stream in (True, False):
            answer = await client.post("/api/chat", json={**asked, "stream": stream})
            found = logprobs_in(f"{answer.text.rstrip()}\n")
            assert [each["token"] for each in found] == ["H", "e", "y"]
            for each in found:
                assert each["logprob"] <= 0
                assert each["bytes"] == list(each["token"].encode())
                assert len(each["top_logprobs"]) == 1  # a script is sure of everything
        plain = await client.post("/api/chat", json=asked | {"top_logprobs": None})
    assert [each["top_logprobs"] for each in logprobs_in(plain.text)] == [[]] * 3


def logprobs_in(text: str) -> list[dict[str, Any]]:
    return [each for part in lines_in(text) for each in part.get("logprobs", ())]


# -- generate


async def test_a_prompt_is_answered_as_a_chat() -> None:
    backend, prompts = noting(ANSWERS["thinking"])
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    body = {"prompt": "Hi", "system": "Be brief."}
    async with client_of(backend) as client:
        data = await ask(client, "/api/generate", body)
        await ask(client, "/api/chat", {"messages": messages})
        *parts, last = lines_in((await client.post("/api/generate", json=body)).text)
    assert prompts[0] == prompts[1] == prompts[2]
    assert [*data][2:5] == ["response", "thinking", "done"]  # Ollama's order
    for end in (data, last):
        check_times(end)
        assert end.pop("prompt_eval_count") == len(prompts[0])
        assert end.pop("eval_count") > 9
    done = {"model": "scripted", "done": True, "done_reason": "stop"}
    assert data == {**done, "response": "It rains.", "thinking": "Let me see."}
    assert last == {**done, "response": ""}
    assert "".join(part.get("thinking") or "" for part in parts) == "Let me see."
    assert "".join(part["response"] for part in parts) == "It rains."


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


async def test_nothing_to_answer_loads_the_model() -> None:
    backend = answering("Hello")
    nothing = {"message": {"role": "assistant", "content": ""}}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("/api/chat", {"messages": []}, nothing),
        ("/api/chat", {}, nothing),
        ("/api/generate", {"prompt": ""}, {"response": ""}),
    ]
    async with client_of(backend) as client:
        for path, body, empty in cases:
            data = (await client.post(path, json=body | {"model": "scripted"})).json()
            assert data.pop("created_at")
            assert data == {"model": "scripted", **empty, "done": True, "done_reason": "load"}
    assert backend.n_decodes == 0


# -- what the model and the server cannot do


async def test_errors_as_the_client_raises_them() -> None:
    def use(client: ollama.Client) -> None:
        for stream in (True, False):
            with pytest.raises(ollama.ResponseError, match="top_p") as caught:
                for _ in client.chat(**ASK, options={"top_p": -1}, stream=stream):
                    pass
            assert caught.value.status_code == 400
        with pytest.raises(ollama.ResponseError) as caught:
            client.show("another")
        assert caught.value.status_code == 404

    await use_ollama(answering("Hi"), use)


async def test_options_set_by_flags_are_left_out() -> None:
    options = {"num_ctx": 4097, "num_thread": 4, "num_gpu": 99, "seed": 2**63 - 1}
    async with client_of(answering("Hi")) as client:
        for path, body in (("/api/chat", ASK), ("/api/generate", {"prompt": "Hi"})):
            fields = {"options": options, "shift": True, "truncate": True}
            answer = await client.post(path, json=body | fields)
            assert answer.status_code == 200


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


# -- life


@pytest.mark.system
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
