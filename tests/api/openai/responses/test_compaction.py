"""Compaction in the Responses API: triggers, thresholds, the route, and truncation."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.api.openai.responses.test_routes import events_in
from tests.support.clients import client_and_service, client_of, use_openai
from tests.support.compacted import Model, serve
from tests.support.event_source import payloads_in
from tests.support.http_server import slots_in_use
from tests.support.media_files import image_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering
from tests.support.waiting import until
from trioserve.chat.compaction import PREFACE, TASK

TRIGGER = {"type": "compaction_trigger"}
TOOL: Any = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(n: int) -> dict[str, Any]:
    arguments = json.dumps({"file": f"f{n}"})
    return {"type": "function_call", "call_id": f"c{n}", "name": "read", "arguments": arguments}


def result(n: int, text: str = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{n}", "output": text}


async def post(client: httpx.AsyncClient, path: str = "", **body: Any) -> dict[str, Any]:
    answer = await client.post(f"/v1/responses{path}", json={"model": "any", **body})
    assert answer.status_code == 200, answer.text
    given: dict[str, Any] = answer.json()
    return given


async def refused(client: httpx.AsyncClient, path: str = "", **body: Any) -> dict[str, Any]:
    answer = await client.post(f"/v1/responses{path}", json={"model": "any", **body})
    assert answer.status_code >= 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_a_trigger_gives_one_item_that_continues_elsewhere() -> None:
    model = Model()
    given = [
        said("developer", "Be brief."),
        said("user", "Mind fact-one."),
        said("assistant", "fact-two"),
        said("user", "Read f1 and f2."),
        call(1),
        result(1, "fact-three"),
        call(2),
    ]
    async with serve(model) as client:
        body = {"input": [*given, TRIGGER], "tools": [TOOL], "stream": True}
        text = (await client.post("/v1/responses", json=body)).text
    events = events_in(text)
    kinds = [one["type"] for one in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
        "response.completed",
    ]
    (item,) = events[-1]["response"]["output"]
    assert item == events[4]["item"]
    assert events[-1]["response"]["usage"]["input_tokens"] == len(model.prompts[0])
    assert "f2" not in model.prompts[0].replace("Read f1 and f2.", "")  # it is open
    held = json.loads(item["encrypted_content"])
    assert held["summary"] == "Summary: fact-one, fact-two, fact-three"

    # The client keeps what users said. Another server continues.
    async with serve(other := Model()) as client:
        users = [one for one in given if one.get("role") in ("user", "developer")]
        rest = [said("user", "ignored"), said("assistant", "gone"), *users, item, result(2, "4")]
        response = await post(client, input=rest, tools=[TOOL])
    assert response["output"][0]["content"][0]["text"] == "Well."
    (prompt,) = other.prompts
    assert "gone" not in prompt
    places = [
        prompt.index(text)
        for text in (
            "Be brief.",
            "Mind fact-one.",
            PREFACE.strip(),
            held["summary"],
            '"f1"',
            '"f2"',
        )
    ]
    assert places == sorted(places)
    assert prompt.rindex('"f2"') < prompt.rindex("4")


async def test_a_threshold_compacts_and_answers() -> None:
    model = Model("<think>\nhm\n</think>\n\nDone.")
    history = [said("developer", "Be brief."), said("user", "Mind fact-one.")]
    for i in range(6):
        history += [said("assistant", f"a{i} " + "x" * 300), said("user", f"u{i} " + "y" * 300)]
    managed = [{"type": "compaction", "compact_threshold": 3000}]
    async with serve(model) as client:
        few = await post(client, input=history[:2], context_management=managed)
        assert [one["type"] for one in few["output"]] == ["reasoning", "message"]
        body = {"input": history, "context_management": managed, "stream": True}
        events = events_in((await client.post("/v1/responses", json=body)).text)
        response = events[-1]["response"]
        Response.model_validate(response)
        assert [one["type"] for one in response["output"]] == ["compaction", "reasoning", "message"]
        usage = response["usage"]
        assert usage["input_tokens"] == len(model.prompts[-1]) < 3000 < len(model.prompts[-2])
        assert usage["compaction"]["input_tokens"] == len(model.prompts[-2])
        # All items come back; what was before the compaction is gone but for the rules.
        again = [*history, *response["output"], said("user", "Continue.")]
        await post(client, input=again, context_management=managed)
    assert len(model.prompts) == 4
    last = model.prompts[-1]
    assert last.startswith(model.prompts[-2])  # so that it is cached
    assert "u5 " in last and "u0 " not in last and "Summary: fact-one" in last
    assert "Be brief." in last


@pytest.mark.parametrize("stream", [False, True])
async def test_no_summary(stream: bool) -> None:
    """Without a summary, a threshold has no effect, and a trigger is an error."""
    model = Model(summary="<think>\nfact\n</think>")
    entry = [{"type": "compaction", "compact_threshold": 10}]
    async with serve(model) as client:
        response = await post(client, input="Hi", context_management=entry)
        empty, message = response["output"]
        assert (empty["type"], empty["encrypted_content"]) == ("compaction", "")
        assert message["content"][0]["text"] == "Well."
        await post(client, input=[said("user", "Hi"), empty, said("user", "You")])
        assert "Hi" in model.prompts[-1]
        asked = [said("user", "Hi"), TRIGGER]
        if not stream:
            assert (await refused(client, input=asked))["code"] == "compaction_unavailable"
            return
        text = (await client.post("/v1/responses", json={"input": asked, "stream": True})).text
        assert '"type":"response.failed"' in text
        assert "wrote no summary" in text


async def test_the_route() -> None:
    model = Model()
    history = [said("user", "Mind fact-one."), said("assistant", "fact-two"), said("user", "More")]
    found: list[Any] = []

    def use(client: openai.OpenAI) -> None:
        compacted = client.responses.compact(model="any", input=history)
        output: Any = compacted.to_dict(warnings=False)["output"]
        more = [*output, said("user", "Continue.")]
        found.append((compacted, client.responses.create(model="any", input=more).output_text))
        first = client.responses.create(model="any", input=history)
        found.append(client.responses.compact(model="any", previous_response_id=first.id))

    await use_openai(answering(model, n_ctx=8192), use)
    (compacted, text), more = found
    assert compacted.object == "response.compaction"
    assert [one.type for one in compacted.output] == ["message", "message", "compaction"]
    assert compacted.usage.total_tokens > 0
    assert text == "Well."
    assert "Summary: fact-one, fact-two" in model.prompts[1]
    assert [one.type for one in more.output] == ["message", "message", "compaction"]


async def test_a_conversation_longer_than_the_context_is_read_in_parts() -> None:
    model = Model()
    facts = [f"fact-n{i}" for i in range(40)]
    text = "\n".join(f"{fact} {'z' * 400}" for fact in facts)  # one message, twice the context

    def script(prompt: str) -> str:
        model.prompts.append(prompt)
        known = re.findall(r"fact-\w+", prompt)
        return "Summary: " + ", ".join(dict.fromkeys(known))

    async with client_of(answering(script, n_ctx=8192)) as client:
        response = await post(client, input=[said("user", text), TRIGGER])
    held = json.loads(response["output"][0]["encrypted_content"])
    assert set(re.findall(r"fact-\w+", held["summary"])) == {*facts}
    assert len(model.prompts) > 2
    assert response["usage"]["input_tokens"] == sum(map(len, model.prompts))


async def test_truncation() -> None:
    model = Model()
    history = [said("developer", "Be brief.")]
    for i in range(12):
        history += [said("user", f"u{i} " + "y" * 500), call(i), result(i, f"r{i} " + "x" * 500)]
    async with serve(model) as client:
        error = await refused(client, input=history, tools=[TOOL])
        assert error["code"] == "context_length_exceeded"
        response = await post(client, input=history, tools=[TOOL], truncation="auto")
    assert response["truncation"] == "auto"
    (prompt,) = model.prompts
    assert "Be brief." in prompt
    kept = re.findall(r"\bu(\d+) ", prompt)
    assert kept == [str(i) for i in range(12 - len(kept), 12)]
    assert len(kept) > 3
    assert len(re.findall(r"\br(\d+) ", prompt)) in (len(kept), len(kept) + 1)
    assert len(prompt) <= 8192 * 3 // 4


FOREIGN = [
    {"type": "compaction", "encrypted_content": "gAAAAAB"},
    {"type": "compaction_summary", "encrypted_content": '{"type": "trioserve.compaction"}'},
    {"type": "context_compaction", "encrypted_content": "[" * 100_000},
    {
        "type": "compaction",
        "encrypted_content": json.dumps(
            {"type": "trioserve.compaction", "summary": "s", "kept": [{"role": 1}]}
        ),
    },
]


@pytest.mark.parametrize("item", FOREIGN)
async def test_compactions_of_other_servers_are_refused(item: dict[str, Any]) -> None:
    async with serve(Model()) as client:
        error = await refused(client, input=[said("user", "Hi"), item])
        assert error["param"].startswith("input[1].encrypted_content")
        error = await refused(client, input=[TRIGGER, said("user", "Hi")])
        assert error["message"] == "'input[0]' must be the last item."
        error = await refused(client, input=[said("developer", "Be brief."), TRIGGER])
        assert error["code"] == "compaction_nothing_to_summarize"
        error = await refused(client, input="Hi", context_management=[{"type": "other"}])
        assert error["param"] == "context_management[0].type"
        for empty in (None, ""):
            item = {"type": "context_compaction", "encrypted_content": empty}
            await post(client, input=[said("user", "Hi"), item])


async def test_constraints_of_the_answer_leave_the_summary_free() -> None:
    """Required calls, formats and stop strings count for the answer alone."""
    call_text = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    managed = [{"type": "compaction", "compact_threshold": 10}]
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    format = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    async with serve(Model(call_text)) as client:
        body = {"input": "fact-one", "tools": [TOOL], "context_management": managed}
        response = await post(client, **body, tool_choice="required", parallel_tool_calls=False)
        compaction, made = response["output"]
        assert made["type"] == "function_call"
        assert "Summary: fact-one" in compaction["encrypted_content"]
    async with serve(Model('{"a":1}')) as client:
        body = {"input": "fact-one", "context_management": managed, "text": format}
        response = await post(client, **body, stop=["fact"])
        compaction, message = response["output"]
        assert json.loads(message["content"][0]["text"]) == {"a": 1}
        assert "Summary: fact-one" in compaction["encrypted_content"]


@pytest.mark.system
async def test_files_are_kept() -> None:
    model = Model()
    url = f"data:image/png;base64,{b64encode(image_file(size=(8, 4))).decode()}"
    text = f"data:text/plain;base64,{b64encode(b'Cats.').decode()}"
    parts = [
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "filename": "a.txt", "file_data": text},
        {"type": "input_text", "text": "So?"},
    ]
    managed = [{"type": "compaction", "compact_threshold": 10}]
    given = [said("user", "fact-one"), said("assistant", "Ah."), {"role": "user", "content": parts}]
    async with serve(model, projector=WordProjector()) as client:
        response = await post(client, input=given, context_management=managed)
        again = [response["output"][0], said("user", "Continue.")]
        await post(client, input=again)
    assert len(model.prompts) == 3
    for prompt in model.prompts:
        assert "(image 8x4)" in prompt and "Cats." in prompt
        assert "Summary: fact-one" in prompt or TASK in prompt


async def test_in_the_background_and_resumed() -> None:
    """A session has the events of a compaction, and the stored response its items."""
    model = Model()
    managed = [{"type": "compaction", "compact_threshold": 10}]
    async with serve(model) as client:
        body = {"input": "fact-one", "context_management": managed, "background": True}
        answer = await client.post("/v1/responses", json={**body, "stream": True})
        events = payloads_in(answer.content)
        id_ = events[-1]["response"]["id"]
        again = await client.get(f"/v1/responses/{id_}?stream=true&starting_after=3")
        assert payloads_in(again.content) == events[4:]
        stored = (await client.get(f"/v1/responses/{id_}")).json()
        assert [one["type"] for one in stored["output"]] == ["compaction", "message"]
        await post(client, input="Continue.", previous_response_id=id_)
        assert "Summary: fact-one" in model.prompts[-1]
        assert model.prompts[-1].count("fact-one") == 2  # in the summary, and in the last turn
        triggered = await post(client, input=[TRIGGER], previous_response_id=id_)
        await post(client, input="Continue.", previous_response_id=triggered["id"])
        assert "Summary: fact-one" in model.prompts[-1]


async def test_a_deadline_ends_the_summary() -> None:
    backend = answering(lambda prompt: "x" * 100_000, n_ctx=400_000, n_ctx_seq=200_000)
    backend.on_decode = lambda _backend: time.sleep(0.001)
    async with client_and_service(backend) as (client, service):
        body = {"input": [said("user", "Hi"), TRIGGER], "timeout": 0.2}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 504

        async def is_idle() -> bool:
            return await slots_in_use(service) == 0

        await until(is_idle)
