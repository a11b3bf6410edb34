"""Questions of MCP servers while a tool runs: elicitation, sampling and roots."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mcp_types
import pytest
import trio
import trio.testing
from mcp.client.session import ClientRequestContext

from tests.support.clients import client_and_service
from tests.support.mcp_servers import config_of, odd, opened
from tests.support.scripts import answering
from trioserve.tools.mcp.questions import Questions
from trioserve.tools.mcp.tools import McpServers, open_mcp_servers
from trioserve.tools.tool import ToolCallContext

pytestmark = pytest.mark.system

FORM = {
    "message": "Which\u202e day?",
    "requestedSchema": {
        "type": "object",
        "properties": {"day": {"type": "string", "enum": ["Mo", "Tu"]}, "n": {"type": "integer"}},
        "required": ["day"],
    },
}
PAGE = {"mode": "url", "message": "Log in", "url": "https://example.org/", "elicitationId": "1"}
SAMPLE = {
    "messages": [{"role": "user", "content": {"type": "text", "text": "Two words, please"}}],
    "systemPrompt": "Be brief.",
    "maxTokens": 10**9,
    "stopSequences": ["."],
}

#: The context of a question, which its answer does not depend on.
NOWHERE = cast(ClientRequestContext, None)


async def ask(
    servers: McpServers, method: str, params: Mapping[str, Any], **context: Any
) -> dict[str, Any]:
    """Have a server ask during a call; gives the answer that it gets."""
    arguments = {"method": method, "params": params}
    result = await servers.tools["a_ask"].call(arguments, ToolCallContext(**context))
    answer: dict[str, Any] = json.loads(result.text)
    return answer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ('{"day": "Mo", "n": 3}', {"action": "accept", "content": {"day": "Mo", "n": 3}}),
        ('{"day": "We"}', {"action": "decline"}),
        ('{"day": "Mo", "n": true}', {"action": "decline"}),
        ('{"day": "Mo", "more": 1}', {"action": "decline"}),
        ("{}", {"action": "decline"}),
        ("Monday", {"action": "decline"}),
        (None, {"action": "decline"}),
    ],
)
async def test_a_form_is_filled_in_by_the_one_who_approves(
    words: str | None, expected: dict[str, Any]
) -> None:
    asked = list[str]()

    async def answer(question: str) -> str | None:
        asked.append(question)
        return words

    async with opened(a=odd("new")) as servers:
        assert await ask(servers, "elicitation/create", FORM, ask=answer) == expected
    assert asked[0].startswith("The MCP server a asks: Which day?")


async def test_a_page_is_opened_by_the_one_who_approves() -> None:
    async def agree(question: str) -> str | None:
        return "" if "https://example.org/" in question else None

    async with opened(a=odd("new")) as servers:
        assert await ask(servers, "elicitation/create", PAGE, ask=agree) == {"action": "accept"}


async def test_the_model_answers_once_a_person_agrees() -> None:
    given = list[Any]()

    async def agree(question: str) -> str | None:
        given.append(question)
        return ""

    async def generate(
        messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> tuple[str, str]:
        given.append((messages, fields))
        return "Yes indeed", "model"

    async with opened(a=odd("new")) as servers:
        answer = await ask(servers, "sampling/createMessage", SAMPLE, ask=agree, generate=generate)
        tools = SAMPLE | {"tools": [{"name": "x", "inputSchema": {"type": "object"}}]}
        refused = await ask(servers, "sampling/createMessage", tools, ask=agree, generate=generate)
        nobody = await ask(servers, "sampling/createMessage", SAMPLE, generate=generate)
    assert answer["content"] == {"type": "text", "text": "Yes indeed"}
    assert answer["model"] == "model"
    question, (messages, fields) = given
    assert "system: Be brief.\n\nuser: Two words, please" in question
    assert [each["role"] for each in messages] == ["system", "user"]
    assert fields == {"max_tokens": 2048, "stop": ["."]}
    assert "Declined" in refused["message"] and "Declined" in nobody["message"]


async def test_a_question_of_one_of_two_calls_is_declined() -> None:
    async def agree(_question: str) -> str | None:
        return "{}"

    async with opened(a=odd("new")) as servers, trio.open_nursery() as nursery:
        nursery.start_soon(
            servers.tools["a_sleep"].call, {"seconds": 1000}, ToolCallContext(ask=agree)
        )
        await trio.sleep(0.2)
        answer = await ask(servers, "elicitation/create", FORM, ask=agree)
        assert answer == {"action": "decline"}
        nursery.cancel_scope.cancel()


async def test_questions_of_a_call_may_overlap_and_its_time_stands_until_the_last() -> None:
    answers, extended, may_answer = list[str](), list[float](), trio.Event()

    async def think(_question: str) -> str | None:
        await may_answer.wait()
        return "{}"

    async def elicit() -> None:
        form = {"type": "object", "properties": {}}
        params = mcp_types.ElicitRequestFormParams(message="?", requested_schema=form)
        answer = await questions.elicit(NOWHERE, params)
        assert isinstance(answer, mcp_types.ElicitResult)
        answers.append(answer.action)

    questions = Questions("a")
    with questions.during(ToolCallContext(ask=think), extended.append, 5.0):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(elicit)
            await trio.testing.wait_all_tasks_blocked()
            may_answer.set()
    assert answers == ["accept"] * 3
    assert extended == [math.inf] * 3 + [5.0]


async def test_a_call_asks_the_model_a_few_times_at_most_also_where_nobody_is_asked() -> None:
    async def generate(*_: Any) -> tuple[str, str]:
        return "Yes", "model"

    params = mcp_types.CreateMessageRequestParams.model_validate(SAMPLE)
    questions = Questions("a")
    context = ToolCallContext(approves_all=True, generate=generate)
    with questions.during(context, lambda seconds: None, 5.0):
        answers = [await questions.sample(NOWHERE, params) for _ in range(9)]
    assert [isinstance(each, mcp_types.ErrorData) for each in answers] == [False] * 8 + [True]


async def test_the_time_of_a_call_stands_still_while_a_person_thinks() -> None:
    async def slowly(_question: str) -> str | None:
        await trio.sleep(2)
        return '{"day": "Mo"}'

    async with opened(a=odd("new", timeout_ms=1000)) as servers:
        answer = await ask(servers, "elicitation/create", FORM, ask=slowly)
    assert answer["action"] == "accept"


async def test_folders_are_those_of_the_tools(tmp_path: Path) -> None:
    config = config_of(a=odd("new"))
    import attrs

    config = attrs.evolve(config, tools_dir=(str(tmp_path),))
    async with open_mcp_servers(config, wait_seconds=30.0) as servers:
        await servers.listed()
        answer = await ask(servers, "roots/list", {})
    assert answer == {"roots": [{"uri": tmp_path.as_uri(), "name": tmp_path.name}]}


async def test_questions_are_approvals_of_the_run() -> None:
    arguments = {"method": "elicitation/create", "params": FORM}
    call = json.dumps({"name": "a_ask", "arguments": arguments})
    script = f"<tool_call>\n{call}\n</tool_call>"
    backend = answering(
        lambda prompt: "Done." if "<tool_response>" in prompt else script, n_ctx=16384
    )
    entries = json.dumps({"mcpServers": {"a": odd("new")}})
    asked = {"messages": [{"role": "user", "content": "Go"}], "stream": True}
    asked |= {"trioserve_run_tools": True}
    reasons = ["", '{"day": "Tu"}']
    seen = list[dict[str, Any]]()
    async with client_and_service(backend, mcp_servers_json=entries) as (client, service):
        await service.tools.listed()
        async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                event = chunk.get("trioserve_event", {})
                seen.append(event)
                if event.get("type") == "approval":
                    body = {"call_id": event["call_id"], "approve": True, "reason": reasons.pop(0)}
                    path = f"/v1/chat/completions/{chunk['id']}/approve"
                    assert (await client.post(path, json=body)).status_code == 200
    approvals = [event for event in seen if event.get("type") == "approval"]
    assert "Which day?" in approvals[1]["preview"]
    (result,) = [event for event in seen if event.get("type") == "result"]
    assert json.loads(result["content"]) == {"action": "accept", "content": {"day": "Tu"}}
