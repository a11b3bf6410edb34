"""Compaction of chats whose messages the client keeps."""

from __future__ import annotations

from typing import Any

from tests.support.clients import error_body
from tests.support.compacted import Model, serve
from trioserve.chat.compaction import PREFACE

PATH = "/v1/chat/completions/compact"


async def test_a_chat_continues_from_compacted_messages() -> None:
    model = Model()
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rules = {"role": "system", "content": "Be brief."}
    messages: list[dict[str, Any]] = [
        rules,
        {"role": "user", "content": "fact-one " + "x" * 3000},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "user", "content": [{"type": "text", "text": "Wait."}]},
    ]
    async with serve(model) as client:
        body = {"messages": messages, "max_tokens": 5, "stop": ["Sum"]}
        given = (await client.post(PATH, json=body)).json()
        more = [*given["messages"], {"role": "assistant", "content": "Yes."}]
        more.append({"role": "user", "content": "Continue."})
        answer = await client.post("/v1/chat/completions", json={"messages": more})
        assert answer.status_code == 200
        for name, value in (("stream", True), ("n", 2), ("trioserve_run_tools", True)):
            refused = await client.post(PATH, json={**body, name: value})
            message = f"'{name}' is not supported here; leave it out."
            assert refused.json() == error_body(message, name)
    assert given["summary"] == "Summary: fact-one"
    assert given["usage"]["prompt_tokens"] == len(model.prompts[0])
    assert given["messages"] == [
        rules,
        {"role": "user", "content": PREFACE + "Summary: fact-one"},
        *messages[2:],
    ]
