"""``__verbose``: an answer of OpenAI's routes, as llama-server's own routes write it."""

from __future__ import annotations

from tests.support.clients import client_of, events_in
from tests.support.scripts import HI, answering

CHAT = ("/v1/chat/completions", {"messages": HI})
TEXT = ("/v1/completions", {"prompt": "abc"})


async def test_it_is_there_when_it_is_asked_for() -> None:
    async with client_of(answering("Hello you")) as client:
        for (path, body), include_usage in ((CHAT, True), (TEXT, False)):
            asked = body | {"verbose": True, "max_tokens": 3, "seed": 9}
            streamed = asked | {"stream": True, "stream_options": {"include_usage": include_usage}}
            whole = (await client.post(path, json=asked)).json()["__verbose"]
            events = events_in((await client.post(path, json=streamed)).text)
            plain = (await client.post(path, json=body)).json()
            assert "__verbose" not in plain
            assert (whole["content"], whole["tokens"]) == ("Hel", list(b"Hel"))
            assert whole["generation_settings"]["seed"] == 9
            assert whole["stop_type"] == "limit"
            assert whole["tokens_evaluated"] == len(whole["prompt"])
            (last,) = [event["__verbose"] for event in events if "__verbose" in event]
            assert (last["content"], last["tokens"], last["prompt"]) == ("", [], whole["prompt"])


async def test_the_log_level_debug_asks_for_it() -> None:
    async with client_of(answering("Hello you"), log_level="debug") as client:
        for verbose, there in ((None, True), (False, False)):
            answer = await client.post(CHAT[0], json=CHAT[1] | {"verbose": verbose})
            assert ("__verbose" in answer.json()) is there
