"""A model without a chat template, and without the tokens of ChatML, chats in plain text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import client_of
from tests.support.scripts import HI, answering, noting
from tests.support.sentence_pieces import write_sentence_pieces, write_unigrams
from tests.support.served_model import served_model
from trioserve.chat.template.builtin import CHATML_TOKENS
from trioserve.testing import ScriptedBackend

PROMPT = "User:\nHi\n\nAssistant:\n"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 99},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "Hi"},
}


def without(text: str) -> ScriptedBackend:
    return answering(text, chat_template=None)


async def test_the_answer_ends_where_the_next_turn_begins() -> None:
    backend, prompts = noting("Yo.\nUser? No.\n\nUser:\nBye", chat_template=None)
    async with client_of(backend) as client:
        answers = {
            path: (await client.post(path, json={**body, "stream": False})).json()
            for path, body in ROUTES.items()
        }
        streamed = await client.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert prompts == [PROMPT] * (len(ROUTES) + 1)
    said = "Yo.\nUser? No."
    choice = answers["/v1/chat/completions"]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
    (item,) = answers["/v1/responses"]["output"]
    assert item["content"][0]["text"] == said
    message = answers["/v1/messages"]
    assert [block["text"] for block in message["content"]] == [said]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert answers["/api/chat"]["message"]["content"] == said
    assert answers["/api/generate"]["response"] == said
    assert "Bye" not in streamed.text and '"finish_reason":"stop"' in streamed.text


async def test_words_of_the_client_are_its_own() -> None:
    async with client_of(without("Yo\nUser:\nBye")) as client:
        for word in ("\nUser:", "Yo"):
            body = {**ROUTES["/v1/messages"], "stop_sequences": [word]}
            answer = (await client.post("/v1/messages", json=body)).json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)


async def test_a_text_that_is_continued_does_not_end_there() -> None:
    async with client_of(without("a\nUser: b")) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert answer.json()["choices"][0]["text"] == "a\nUser: b"


async def test_it_can_be_chosen_by_name() -> None:
    backend, prompts = noting("Yo\n\nUser:\nBye")
    async with client_of(backend, chat_template="plain") as client:
        answer = await client.post("/v1/chat/completions", json={"messages": HI})
        assert (await client.get("/props")).json()["has_chat_template"] is True
    assert prompts == [PROMPT]
    assert answer.json()["choices"][0]["message"]["content"] == "Yo"


# -- real vocabularies


@pytest.mark.parametrize(
    ("write", "prompt"),
    [
        (write_sentence_pieces, PROMPT),
        (
            partial(write_sentence_pieces, defined=CHATML_TOKENS),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (write_unigrams, "User: Hi  Assistant:"),
    ],
    ids=["bytes", "ChatML", "no line breaks"],
)
def test_the_vocabulary_decides(write: Callable[[Path], Path], prompt: str, tmp_path: Path) -> None:
    with served_model(write(tmp_path / "model.gguf"), parallel=1) as served:
        assert served.post("/apply-template", {"messages": HI})["prompt"] == prompt
        answer = served.post("/v1/chat/completions", {"messages": HI, "max_tokens": 3})
        assert answer["usage"]["completion_tokens"] == 3
