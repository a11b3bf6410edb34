"""A header, a query, a path or a name that should have a number and does not is a 400."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.support.clients import client_of
from tests.support.scripts import answering

#: Python's `int` refuses the first one, and `str.isdigit` takes the second.
NUMBERS = pytest.mark.parametrize("number", ["9" * 5000, "²"], ids=["long", "superscript"])


def refused(answer: httpx.Response) -> Any:
    """The field that an answer with status 400 names."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"] if "param" in error else error["message"].split("'")[1]  # Anthropic's


@NUMBERS
async def test_the_limit_of_a_list(number: str) -> None:
    async with client_of(answering("Hello")) as client:
        id_ = (await client.post("/v1/responses", json={"input": "Hi"})).json()["id"]
        paths = (await client.get("/openapi.json")).json()["paths"]
        lists = [
            re.sub("{.*?}", id_, path)
            for path, methods in paths.items()
            if any(one["name"] == "limit" for one in methods.get("get", {}).get("parameters", ()))
        ]
        assert len(lists) >= 4
        for path in lists:
            assert refused(await client.get(path, params={"limit": number})) == "limit", path


@NUMBERS
async def test_a_place_in_a_stream(number: str) -> None:
    async with client_of(answering("Hello")) as client:
        body = {"input": "Hi", "background": True, "stream": True}
        id_ = (await client.post("/v1/responses", json=body)).text.partition('"resp_')[2][:32]
        wanted = {"stream": "true", "starting_after": number}
        answer = await client.get(f"/v1/responses/resp_{id_}", params=wanted)
        assert refused(answer) == "starting_after"

        session = {"X-Conversation-Id": "one"}
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        await client.post("/v1/chat/completions", json=body, headers=session)
        answer = await client.get("/v1/stream", params={"conv_id": "one", "from": number})
        assert refused(answer) == "from"
        header = {"Last-Event-ID": number.encode("latin-1")}
        assert (
            refused(await client.get("/v1/stream?conv_id=one", headers=header)) == "Last-Event-ID"
        )


@NUMBERS
async def test_the_number_of_a_slot(number: str) -> None:
    async with client_of(slot_save_path=".") as client:
        answer = await client.post(f"/slots/{number}", params={"action": "erase"}, json={})
        assert refused(answer) == "id_slot"


@NUMBERS
async def test_a_bias_of_a_token(number: str) -> None:
    async with client_of() as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {number: 1}}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 if number == "²" else refused(answer) == "logit_bias"


@pytest.mark.parametrize("name", ["messages[7]", "tools[7].function", "tools[²]"])
async def test_a_function_that_is_named_like_a_field(name: str) -> None:
    async with client_of() as client:
        functions = [{"type": "function", "name": "other"}]
        choice = {"type": "function", "name": name}
        body = {"input": "Hi", "tools": functions, "tool_choice": choice}
        assert refused(await client.post("/v1/responses", json=body)) == "tool_choice"
