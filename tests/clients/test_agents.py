"""An agent framework, OpenAI's Agents SDK, with tools over streams: what its users run."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import agents
import pytest
import trio
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI

from tests.support.http_server import serving_script
from tests.support.scripts import TEMPLATE
from trioserve.testing import ScriptedBackend


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def script(prompt: str) -> str:
    """Think, ask for the weather of two cities at once, then for a sum, then answer."""
    n_results = prompt.count("<tool_response>")
    if n_results == 0:
        calls = [call("weather", '{"city": "Paris"}'), call("weather", '{"city": "Rome"}')]
        return "<think>\nTwo cities.\n</think>\n\n" + "\n".join(calls)
    if n_results == 2:
        return "Let me add. " + call("add", '{"a": 20, "b": 22}')
    return "The sum is 42 degrees."


@pytest.mark.parametrize("model_class", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_an_agent_uses_tools(model_class: Any) -> None:
    called: list[tuple[str, object]] = []

    @agents.function_tool
    def weather(city: str) -> str:
        called.append(("weather", city))
        return {"Paris": "20 degrees", "Rome": "22 degrees"}[city]

    @agents.function_tool
    def add(a: int, b: int) -> int:
        called.append(("add", (a, b)))
        return a + b

    async def use(url: str) -> tuple[str, list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            agent = agents.Agent(
                name="Meteorologist",
                instructions="Use the tools.",
                tools=[weather, add],
                model=model_class(model="any", openai_client=client),
            )
            config = agents.RunConfig(tracing_disabled=True)
            result = agents.Runner.run_streamed(agent, "How warm?", run_config=config)
            items, texts = [], []
            async for event in result.stream_events():
                if event.type == "run_item_stream_event":
                    items.append(event.item.type)
                elif getattr(event, "data", None) is not None and (
                    event.data.type == "response.output_text.delta"
                ):
                    texts.append(event.data.delta)
            return result.final_output, items, texts

    backend = ScriptedBackend(script, n_ctx=4096, chat_template=TEMPLATE)
    async with serving_script(backend) as (url, _):
        final, items, texts = await trio.to_thread.run_sync(asyncio.run, use(url))
    assert final == "The sum is 42 degrees."
    assert sorted(called[:2]) == [("weather", "Paris"), ("weather", "Rome")]
    assert called[2:] == [("add", (20, 22))]
    assert "".join(texts) == "Let me add. The sum is 42 degrees."
    n_items = Counter(items)
    assert n_items["tool_call_item"] == n_items["tool_call_output_item"] == 3
    assert n_items["message_output_item"] == 2
