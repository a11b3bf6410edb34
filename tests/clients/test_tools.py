"""Clients and agent frameworks with the server's tools, and with their own MCP servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import agents
import openai
import pytest
import trio
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel as ResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.scripts import answering
from tests.support.served_tools import client_of_tools
from trioserve.testing import ScriptedBackend
from trioserve.tools.functions import tool_of

RUN = {"trioserve_run_tools": True}


async def get_weather(city: str) -> str:
    """Get the weather for a city."""
    return f"sunny in {city}"


def asking(name: str, **arguments: str) -> ScriptedBackend:
    """A model that calls a tool, and repeats the result."""
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def script(prompt: str) -> str:
        *_, last = prompt.split("<tool_response>\n")
        return f"It says: {last.partition('<')[0].strip()}" if last != prompt else call

    return answering(script)


@asynccontextmanager
async def url_of(backend: ScriptedBackend) -> AsyncIterator[str]:
    async with client_of_tools(backend, tool_of(get_weather)) as (client, _):
        yield f"{client.base_url}/v1"


async def in_asyncio(url: str, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    """Let a framework use a server, in a thread with a loop of asyncio's."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            return await use(client)

    return await trio.to_thread.run_sync(asyncio.run, run())


# -- OpenAI's SDK


async def test_openais_sdk_streams_a_run() -> None:
    def use(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "Weather?"}]
            with client.chat.completions.stream(
                model="any", messages=messages, extra_body=RUN
            ) as stream:
                chunks = [event.chunk for event in stream if event.type == "chunk"]
                final = stream.get_final_completion()
            assert final.choices[0].message.content == "It says: sunny in Paris"
            beside = [chunk.model_extra or {} for chunk in chunks]
            told = [each["trioserve_event"] for each in beside if "trioserve_event" in each]
            assert [event["type"] for event in told] == [
                "step",
                "call",
                "started",
                "result",
                "step",
                "end",
            ]
            whole = client.chat.completions.create(model="any", messages=messages, extra_body=RUN)
            assert whole.choices[0].message.content == final.choices[0].message.content
            added = (whole.model_extra or {})["trioserve_messages"]
            again = client.chat.completions.create(
                model="any", messages=[*messages, *added, *messages], extra_body=RUN
            )
            assert again.choices[0].finish_reason == "stop"

    async with url_of(asking("get_weather", city="Paris")) as url:
        await trio.to_thread.run_sync(use, url)


# -- OpenAI's agents


@pytest.mark.parametrize("model_class", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_an_agent_whose_tools_the_server_runs(model_class: Any) -> None:
    async def use(client: openai.AsyncOpenAI) -> tuple[str, list[str]]:
        agent = agents.Agent(
            name="A",
            model=model_class(model="any", openai_client=client),
            model_settings=agents.ModelSettings(extra_body=RUN),
        )
        config = agents.RunConfig(tracing_disabled=True)
        result = agents.Runner.run_streamed(agent, "Weather?", run_config=config)
        kinds = [
            event.item.type
            async for event in result.stream_events()
            if event.type == "run_item_stream_event"
        ]
        # The next turn is given back all items of this one.
        more: Any = [*result.to_input_list(), {"role": "user", "content": "And now?"}]
        second = await agents.Runner.run(agent, more, run_config=config)
        return f"{result.final_output} {second.final_output}", kinds

    async with url_of(asking("get_weather", city="Rome")) as url:
        final, kinds = await in_asyncio(url, use)
    assert final == "It says: sunny in Rome It says: sunny in Rome"
    assert kinds[-1] == "message_output_item"


# -- pydantic-ai


async def test_pydantic_ai_with_tools_of_its_own() -> None:
    async def use(client: openai.AsyncOpenAI) -> str:
        agent = Agent(OpenAIChatModel("any", provider=OpenAIProvider(openai_client=client)))

        @agent.tool_plain
        def own_weather(city: str) -> str:
            """Get the weather for a city."""
            return f"rain in {city}"

        async with agent.run_stream("Weather?") as streamed:
            return str(await streamed.get_output())

    async with url_of(asking("own_weather", city="Oslo")) as url:
        assert await in_asyncio(url, use) == "It says: rain in Oslo"


async def test_pydantic_ai_whose_tools_the_server_runs() -> None:
    async def use(client: openai.AsyncOpenAI) -> list[str]:
        agent = Agent(
            ResponsesModel("any", provider=OpenAIProvider(openai_client=client)),
            model_settings={"extra_body": RUN},
        )
        first = await agent.run("Weather?")
        second = await agent.run("And now?", message_history=first.all_messages())
        async with agent.run_stream("Weather?") as streamed:
            third = await streamed.get_output()
        return [first.output, second.output, third]

    async with url_of(asking("get_weather", city="Oslo")) as url:
        outputs = await in_asyncio(url, use)
    assert outputs == ["It says: sunny in Oslo"] * 3


# -- the bundled model
