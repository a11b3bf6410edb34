import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be downloaded

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner


def add(a: float, b: float) -> float:
    """Add."""
    return a + b


async def main() -> None:
    arguments = {"api_base": f"{os.environ['URL']}/v1", "api_key": "none"}
    model = LiteLlm("openai/scripted", **arguments)
    agent = Agent(name="calculator", model=model, tools=[add])
    runner = InMemoryRunner(agent=agent)
    [*_, last] = await runner.run_debug("Add the numbers.", quiet=True)
    print("chat:", last.content.parts[0].text)


asyncio.run(main())
