"""Responses with tools that the server runs, on the wire, and with OpenAI's SDK."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest
import trio
from openai.types.responses import Response, ResponseStreamEvent

from tests.support.clients import named_events_in
from tests.support.http_server import chunks_of, post
from tests.support.run_stream import ERASE, WEATHER, Reading, asking, call, weather
from tests.support.served_tools import client_of_tools
from trioserve.testing import ScriptedBackend
from trioserve.tools.functions import tool_of
from trioserve.tools.tool import ToolInfo

RESPONSES = "/v1/responses"
RUN = {"input": "Weather?", "trioserve_run_tools": True}
MINE = {"type": "function", "name": "mine", "parameters": {"type": "object"}}

#: The prefix of the types of events that OpenAI's API does not have.
OURS = "response.trioserve_"


THOUGHT = "<think>\nHm.\n</think>\n\n"


def thinking(*calls: str) -> ScriptedBackend:
    """A model that thinks, makes calls, and answers when it has the results."""
    return asking(*calls, then="Sunny.", before=f"{THOUGHT}Let me see. ")


def both() -> ScriptedBackend:
    return thinking(call("weather", city="Paris"), call("weather", city="Atlantis"))


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(RESPONSES, json={**RUN, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return named_events_in(answer.text)


def types_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


async def test_calls_are_items_with_their_results_and_have_events() -> None:
    async with client_of_tools(both(), WEATHER) as (client, _):
        whole = (await client.post(RESPONSES, json=RUN)).json()
        events = await streamed(client)
    check_items(whole)
    known = pydantic.TypeAdapter[Any](ResponseStreamEvent)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
    theirs = [event for event in events if not event["type"].startswith(OURS)]
    for event in theirs:
        known.validate_python(event)
    made = [event for event in theirs if event.get("output_index") == 2]
    shown = [kind for kind in types_of(made) if kind != "mcp_call_arguments.delta"]
    assert shown == [
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
    ]
    arguments = [event["delta"] for event in made if event["type"].endswith("arguments.delta")]
    assert "".join(arguments) == made[-1]["item"]["arguments"] == '{"city": "Paris"}'
    assert "mcp_call.failed" in types_of(theirs)
    # The two calls ran at the same time, and the response has them in their order.
    last = events[-1]["response"]
    assert stable(last) == stable(whole)
    told = [event["type"].removeprefix(OURS) for event in events if event not in theirs]
    assert told[:3] == ["step", "call", "call"]
    assert told[-2:] == ["step", "end"]
    assert sorted(told[3:-2]) == ["result", "result", "started", "started"]
    assert theirs[-1] == events[-1]


def check_items(response: dict[str, Any]) -> None:
    Response.model_validate(response)
    assert response["status"] == "completed"
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "mcp_call", "mcp_call", "message"]
    _, _, good, bad, last = response["output"]
    assert good["id"].startswith("mcp_call_")
    step = good["trioserve_step"]
    assert good == {
        "id": good["id"],
        "type": "mcp_call",
        "server_label": "trioserve",
        "name": "weather",
        "arguments": '{"city": "Paris"}',
        "approval_request_id": None,
        "output": "sunny in Paris",
        "error": None,
        "status": "completed",
        "trioserve_step": step,
    }
    assert (bad["status"], bad["output"]) == ("failed", None)
    assert bad["error"]["type"] == "mcp_tool_execution_error"
    assert "sunk" in bad["error"]["content"]
    assert last["content"][0]["text"] == "Sunny."
    assert [item["trioserve_step"] == step for item in response["output"]] == [True] * 4 + [False]


def stable(response: dict[str, Any]) -> Any:
    """The parts that two responses to the same request have in common."""
    names = ("id", "trioserve_step")
    items = [
        {name: value for name, value in item.items() if name not in names}
        for item in response["output"]
    ]
    return response["status"], items, response["usage"]["output_tokens"]


async def test_tools_have_the_label_of_their_server() -> None:
    tool = tool_of(weather)
    info = ToolInfo(name="weather", kind="mcp", mcp_server="forecast")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tool), "info", property(lambda _: info))
        async with client_of_tools(thinking(call("weather", city="Rome")), tool) as (client, _):
            response = (await client.post(RESPONSES, json=RUN)).json()
    assert response["output"][2]["server_label"] == "forecast"


async def test_a_call_that_writes_is_approved() -> None:
    body = json.dumps({**RUN, "stream": True}).encode()
    async with (
        client_of_tools(thinking(call("erase", path="a")), ERASE) as (client, _),
        chunks_of(str(client.base_url), post(RESPONSES, body)) as next_chunk,
    ):
        read = Reading(next_chunk)
        id_ = (await read())["response"]["id"]
        while (event := await read())["type"] != f"{OURS}approval":
            pass
        assert event["preview"] is None
        decision = {"call_id": event["call_id"], "approve": True}
        answer = await client.post(f"{RESPONSES}/{id_}/approve", json=decision)
        assert answer.json() == {"success": True}
        while (event := await read())["type"] != "response.completed":
            pass
    assert event["response"]["output"][2]["output"] == "erased a"


async def test_calls_of_the_client_are_its_own() -> None:
    backend = thinking(call("weather", city="Rome"), call("mine"))
    async with client_of_tools(backend, WEATHER) as (client, _):
        response = (await client.post(RESPONSES, json={**RUN, "tools": [MINE]})).json()
        own = response["output"][-1]
        output = {"type": "function_call_output", "call_id": own["call_id"], "output": "1"}
        question = {"role": "user", "content": "Weather?"}
        body = {**RUN, "tools": [MINE], "input": [question, *response["output"], output]}
        second = (await client.post(RESPONSES, json=body)).json()
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "mcp_call", "function_call"]
    assert response["status"] == "completed"
    assert second["output"][0]["content"][0]["text"] == "Sunny."
    used = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert used >= response["usage"]["input_tokens"]


async def test_a_run_that_is_cut_off_is_incomplete() -> None:
    async with client_of_tools(both(), WEATHER) as (client, _):
        for fields, reason, is_cut in (
            ({"trioserve_run_tools": {"max_steps": 1}}, "max_steps", False),
            ({"max_output_tokens": 100}, "max_output_tokens", True),
        ):
            response = (await client.post(RESPONSES, json={**RUN, **fields})).json()
            events = await streamed(client, **fields)
            question = {"role": "user", "content": "Weather?"}
            again = {**RUN, "input": [question, *response["output"], question]}
            assert (await client.post(RESPONSES, json=again)).status_code == 200
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": reason}
            made = [item for item in response["output"] if item["type"] == "mcp_call"]
            assert made
            assert all((item["status"] == "incomplete") == is_cut for item in made)
            assert events[-1]["type"] == "response.incomplete"
            assert stable(events[-1]["response"]) == stable(response)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tool_calls": 1}, "max_tool_calls", "trioserve_run_tools.max_steps"),
    ({"input": [{"role": "assistant", "content": "Well"}]}, "input", "'input' must not end"),
    ({"tools": [{**MINE, "name": "weather"}]}, "tools", "'weather'"),
]


async def test_invalid_options_of_a_run_are_refused() -> None:
    async with client_of_tools(both(), WEATHER) as (client, _):
        for fields, param, message in REFUSED:
            answer = await client.post(RESPONSES, json={**RUN, **fields})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == param
            assert message in error["message"]


@pytest.mark.system
async def test_a_stream_whose_time_is_up_has_failed() -> None:
    async def wait() -> None:
        """Wait."""
        await trio.sleep_forever()

    async with client_of_tools(thinking(call("wait")), tool_of(wait)) as (client, _):
        events = await streamed(client, timeout=1)
    assert types_of(events)[-2:] == ["failed", "error"]
    assert events[-1]["error"]["code"] == "deadline_exceeded"


async def test_openais_sdk_reads_a_run() -> None:
    def use(url: str) -> Any:
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
            client.responses.stream(
                model="any", input="Weather?", extra_body={"trioserve_run_tools": True}
            ) as stream,
        ):
            types = {event.type for event in stream}
            return types, stream.get_final_response()

    async with client_of_tools(both(), WEATHER) as (client, _):
        types, final = await trio.to_thread.run_sync(use, str(client.base_url))
    assert {"response.mcp_call.completed", "response.trioserve_result"} <= types
    assert final.output_text.endswith("Sunny.")
    assert [item.type for item in final.output].count("mcp_call") == 2
