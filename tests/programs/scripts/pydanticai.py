import asyncio
import os

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["URL"]


def add(a: float, b: float) -> float:
    """Add."""
    return a + b


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=URL, api_key="none")
    models = {
        "chat": OpenAIChatModel("scripted", provider=openai),
        "responses": OpenAIResponsesModel("scripted", provider=openai),
        "anthropic": AnthropicModel("scripted", provider=anthropic),
    }
    for name, model in models.items():
        result = await Agent(model, tools=[add]).run("Add the numbers.")
        print(f"{name}:", result.output)


asyncio.run(main())
