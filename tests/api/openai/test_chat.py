"""OpenAI's routes on the wire: the scripted backend, Hypercorn, httpx and OpenAI's SDK."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.clients import client_of, events_in, use_openai
from tests.support.scripts import HI, answering, noting
from tests.support.tool_calls import calls
from trioserve.chat.template.builtin import CHATML
from trioserve.testing import ScriptedBackend

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


# -- chat


async def test_a_whole_chat() -> None:
    async with client_of(answering("Hello you")) as client:
        body = {"messages": HI, "max_tokens": 5}
        answer = await client.post("/v1/chat/completions", json=body)
        other = await client.post("/chat/completions", json=body)
    assert other.status_code == answer.status_code == 200
    data = answer.json()
    assert other.json()["choices"] == data["choices"]
    assert data["object"] == "chat.completion"
    assert data["model"] == "scripted"
    assert data["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert data["choices"] == [
        {"finish_reason": "length", "index": 0, "message": message, "logprobs": None}
    ]
    usage = data["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert data["timings"]["predicted_n"] == 5
    assert data["timings"]["prompt_n"] == usage["prompt_tokens"]


async def test_a_streamed_chat() -> None:
    body = {"messages": HI, "stream": True}
    async with client_of(answering("Hello you")) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        body["stream_options"] = {"include_usage": True}
        counted = await client.post("/v1/chat/completions", json=body)
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    first, *middle, last = events_in(answer.text)
    assert first["object"] == "chat.completion.chunk"
    begin = {"role": "assistant", "content": None}
    assert first["choices"] == [
        {"finish_reason": None, "index": 0, "delta": begin, "logprobs": None}
    ]
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == "Hello you"
    assert {event["choices"][0]["finish_reason"] for event in middle} == {None}
    assert last["choices"] == [{"finish_reason": "stop", "index": 0, "delta": {}, "logprobs": None}]
    assert last["timings"]["predicted_n"] == 10  # with the token that ended it
    assert all("usage" not in event for event in (first, *middle, last))
    assert len({event["id"] for event in (first, *middle, last)}) == 1
    *_, finish, usage = events_in(counted.text)
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == usage["timings"]["predicted_n"] == 10


async def test_logprobs_progress_and_timings_in_a_stream() -> None:
    body = {
        "messages": HI,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 1,
        "return_progress": True,
        "timings_per_token": True,
    }
    async with client_of(answering("Yo")) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    events = events_in(answer.text)
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] > 0
    logprobs = [
        each
        for event in events
        for each in (event["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert "".join(each["token"] for each in logprobs) == "Yo"
    assert logprobs[0] == {
        "id": ord("Y"),
        "token": "Y",
        "bytes": [ord("Y")],
        "logprob": 0.0,
        "top_logprobs": [{"id": ord("Y"), "token": "Y", "bytes": [ord("Y")], "logprob": 0.0}],
    }
    with_text = [e for e in events if e["choices"][0]["delta"].get("content")]
    assert with_text[-1]["timings"]["predicted_n"] in (2, 3)  # the end may have come with it
    assert with_text[-1]["timings"]["prompt_n"] == progress[-1]["total"]


@pytest.mark.parametrize(
    ("said", "content", "reasoning"),
    [
        ("<think>\nHm, é.\n</think>\n\n1 é", "1 é", "Hm, é."),
        ("Yes.", "Yes.", ""),
        ("Well.\n\n" + calls(("weather", {"city": "Paris"})), "Well.", ""),
        ("a b\n" + calls(("weather", {}), ("weather", {"city": "b"})), "a b", ""),
        ("<think>Hm</think>1\n<think>So</think>é", "1\né", "HmSo"),
    ],
)
async def test_logprobs_have_the_tokens_of_the_text(
    said: str, content: str, reasoning: str
) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 1, "tools": [WEATHER]}
    async with client_of(answering(said)) as client:
        whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
    texts = {"content": b"", "reasoning_content": b""}
    streamed = []
    for event in events_in(stream.text):
        (choice,) = event["choices"]
        delta = choice["delta"]
        (name,) = [name for name in texts if delta.get(name)] or [""]
        assert (choice["logprobs"] is None) == (not name)
        if name:
            tokens = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
            assert delta[name] in tokens.decode()  # a character may be split
            texts[name] += tokens
            streamed += choice["logprobs"]["content"]
    assert texts == {"content": content.encode(), "reasoning_content": reasoning.encode()}
    assert whole["logprobs"]["content"] == streamed


async def test_tool_calls() -> None:
    body = {"messages": HI, "tools": [WEATHER]}
    async with client_of(answering(CALL)) as client:
        whole = await client.post("/v1/chat/completions", json=body)
        answer = await client.post("/v1/chat/completions", json=body | {"stream": True})
        none = await client.post("/v1/chat/completions", json=body | {"tool_choice": "none"})
        unparsed = body | {"parse_tool_calls": False}
        left = await client.post("/v1/chat/completions", json=unparsed)
    (choice,) = whole.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    events = events_in(answer.text)
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    written = [
        call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert written[0]["function"] == {"name": "weather", "arguments": ""}
    assert written[0]["id"]
    arguments = "".join(call["function"]["arguments"] for call in written)
    assert json.loads(arguments) == {"city": "Paris"}
    # Calls are text when none may be made, and when they are not to be parsed.
    said = {"role": "assistant", "content": CALL, "refusal": None}
    for other in (none, left):
        (choice,) = other.json()["choices"]
        assert (choice["finish_reason"], choice["message"]) == ("stop", said)


# -- text


async def test_a_whole_completion() -> None:
    body = {"prompt": "abc", "logprobs": 1}
    async with client_of(ScriptedBackend()) as client:
        answer = await client.post("/v1/completions", json=body)
    data = answer.json()
    assert data["object"] == "text_completion"
    (choice,) = data["choices"]
    assert choice["text"] == "ABC"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["A", "B", "C"]  # and no token without text
    assert choice["logprobs"]["token_logprobs"][0] == 0.0
    assert choice["logprobs"]["top_logprobs"][0] == {"A": 0.0}
    assert choice["logprobs"]["content"][0]["id"] == ord("A")
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_in_a_text_count_characters(echo: bool) -> None:
    body = {"prompt": "aé", "logprobs": 1, "echo": echo}
    async with client_of(answering("é€b")) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        stream = await client.post("/v1/completions", json=body | {"stream": True})
    expected = [0, 1, 1, 2, 2, 3, 3, 3, 4] if echo else [0, 0, 1, 1, 1, 2]
    assert whole["logprobs"]["text_offset"][: len(expected)] == expected
    choices = [choice for event in events_in(stream.text) for choice in event["choices"]]
    found = [at for one in choices if one["logprobs"] for at in one["logprobs"]["text_offset"]]
    assert found == expected


async def test_the_tokens_of_a_text_end_before_a_stop_string() -> None:
    body = {"prompt": "a", "logprobs": 1, "stop": ["stop"]}
    async with client_of(answering("é and st stop it")) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        stream = await client.post("/v1/completions", json=body | {"stream": True})
    assert whole["text"] == "é and st "
    parts = [event["choices"][0] for event in events_in(stream.text)]
    for each in (whole, *parts):
        tokens = each["logprobs"]["content"] if each["logprobs"] else []
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == each["text"]
    assert "".join(each["text"] for each in parts) == whole["text"]


async def test_several_prompts_run_at_the_same_time() -> None:
    body = {"prompt": ["ab", [120, 121], "q"], "max_tokens": 3}
    async with client_of(ScriptedBackend()) as client:
        data = (await client.post("/v1/completions", json=body)).json()
        for stream in (True, False):
            bad = {"prompt": ["ab", "x" * 2000, "c"], "stream": stream}
            answer = await client.post("/v1/completions", json=bad)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "exceed_context_size_error"
    assert [choice["text"] for choice in data["choices"]] == ["AB", "XY", "Q"]
    assert [choice["index"] for choice in data["choices"]] == [0, 1, 2]
    assert data["usage"]["prompt_tokens"] == 5


async def test_several_prompts_in_one_stream() -> None:
    body: dict[str, Any] = {"prompt": ["ab", "xy"], "stream": True, "echo": True}
    async with client_of(ScriptedBackend()) as client:
        plain = await client.post("/v1/completions", json=body)
        body["stream_options"] = {"include_usage": True}
        counted = await client.post("/v1/completions", json=body)
    with_usage = []
    for answer in (plain, counted):
        texts = ["", ""]
        events = events_in(answer.text)
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["abAB", "xyXY"]
        with_usage.append([event for event in events if "usage" in event])
    own, (last,) = with_usage
    assert [event["usage"]["prompt_tokens"] for event in own] == [2, 2]
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 4)


# -- messages that the client has begun


async def test_the_model_continues_the_message_of_the_assistant() -> None:
    backend, prompts = noting(" of Paris", chat_template=CHATML)
    messages = [*HI, {"role": "assistant", "content": "The city"}]
    async with client_of(backend) as client:

        async def ask(**body: Any) -> httpx.Response:
            return await client.post("/v1/chat/completions", json={"messages": messages, **body})

        said = (await ask()).json()["choices"][0]["message"]["content"]
        streamed = events_in((await ask(stream=True)).text)
        deltas = [event["choices"][0]["delta"] for event in streamed]
        assert said == "The city of Paris"  # as llama-server has it
        assert "".join(delta.get("content") or "" for delta in deltas) == said
        assert prompts[0].endswith("<|im_start|>assistant\nThe city")
        rendered = await client.post("/apply-template", json={"messages": messages})
        assert rendered.json()["prompt"] == prompts[0] == prompts[1]
        await ask(continue_final_message=False)
        assert prompts[2].endswith("The city<|im_end|>\n<|im_start|>assistant\n")
        await ask(messages=HI, add_generation_prompt=False)
        assert prompts[3].endswith("Hi<|im_end|>\n")
        await ask(messages=messages[1:])
        assert prompts[4] == "<|im_start|>assistant\nThe city"


# -- OpenAI's own client


async def test_the_sdk() -> None:
    def script(prompt: str) -> str:
        return CALL if "weather" in prompt else "Hello you"

    def use(client: openai.OpenAI) -> None:
        chat = client.chat.completions.create(model="m", messages=HI)
        assert chat.choices[0].message.content == "Hello you"
        text = ""
        with client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        ) as stream:
            for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == "Hello you"
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == 10
        with client.chat.completions.stream(model="m", messages=HI, tools=[WEATHER]) as stream:
            stream.until_done()
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.name == "weather"
        assert client.completions.create(model="m", prompt="a").choices[0].text
        assert [model.id for model in client.models.list()] == ["scripted"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=HI, max_tokens=-7)
        assert caught.value.param == "max_tokens"

    await use_openai(answering(script), use)


NO_SCHEMA = {"type": "json_schema", "json_schema": {"schema": 1}}
BAD_SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": NO_SCHEMA}, "response_format"),
    ({"json_schema": "text"}, "json_schema"),
    ({"grammar": 1}, "grammar"),
    ({"grammar": "root ::= 'a'", "json_schema": {}}, "json_schema"),
]


async def test_an_answer_of_a_given_shape() -> None:
    backend = ScriptedBackend(lambda prompt: '{"a": 1}', n_ctx=4096)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: list[dict[str, Any]] = [
        {"type": "json_object"},
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        {"type": "text"},
    ]
    async with client_of(backend) as client:
        for wanted in formats:
            body = {"messages": [{"role": "user", "content": "go"}], "response_format": wanted}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'
        answer = await client.post("/completion", json={"prompt": "go", "json_schema": schema})
        assert answer.json()["content"] == '{"a": 1}'
        for fields, param in BAD_SHAPES:
            answer = await client.post("/completion", json={"prompt": "go", **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


async def test_a_flag_leaves_calls_in_the_content() -> None:
    body = {"messages": HI, "tools": [WEATHER], "parse_tool_calls": True}
    async with client_of(answering(CALL), skip_chat_parsing=True) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        message = answer.json()["choices"][0]["message"]
        assert message["content"] == CALL
        assert "tool_calls" not in message


# -- without Jinja


async def test_without_jinja_output_is_content_and_there_are_no_tools() -> None:
    said = "<think>\nhm\n</think>\n\nYes"
    async with client_of(answering(said), jinja=False, chat_template="chatml") as client:
        answer = await client.post("/v1/chat/completions", json={"messages": HI})
        prompt = await client.post("/apply-template", json={"messages": HI})
        for body in ({"tools": [WEATHER]}, {"tool_choice": "none"}):
            refused = await client.post("/v1/chat/completions", json={"messages": HI, **body})
            assert refused.status_code == 400
            assert "--no-jinja" in refused.json()["error"]["message"]
    assert answer.json()["choices"][0]["message"]["content"] == said
    assert prompt.json()["prompt"].startswith("<|im_start|>user\n")
