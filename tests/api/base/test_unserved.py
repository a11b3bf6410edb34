"""Answers to paths without a route."""

from __future__ import annotations

import pytest

from tests.support.clients import client_of
from tests.support.scripts import answering
from trioserve.api.base.routes import _UNSERVED, not_found
from trioserve.app import create_app
from trioserve.config import Config

KNOWN = [route.path for route in create_app(Config()).extensions["trioserve"].routes]


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/images/generations", ": no model here makes images; chats may contain them."),
        ("/images/edits", ": no model here makes images; chats may contain them."),
        ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/message", "; did you mean /v1/messages?"),
        ("/api/tag", "; did you mean /api/tags?"),
        ("/wp-login.php", "There is no /wp-login.php here."),
        (" ", "There is no such path here."),
        ("/" + "x" * 60_000, "x… here."),
    ],
)
def test_a_path_without_a_route(path: str, end: str) -> None:
    message = not_found(path, KNOWN).message
    assert message.endswith(end)
    assert len(message) < 200


def test_nothing_that_is_served_is_said_not_to_be() -> None:
    for paths in _UNSERVED.values():
        for start in paths:
            assert not [one for one in KNOWN if f"{one}/".startswith(start)]


async def test_the_answer_has_the_form_of_its_vendor() -> None:
    async with client_of(answering("a")) as client:
        answer = await client.post("/v1/images/generations", json={"prompt": "a cat"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("OpenAI's /v1/images/generations is")
        answer = await client.post("/api/create", json={"model": "a"})
        assert answer.json()["error"].startswith("Ollama's /api/create is not served: ")
