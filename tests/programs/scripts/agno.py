import os

from agno.agent import Agent
from agno.models.openai.like import OpenAILike


def add(a: float, b: float) -> float:
    """Add."""
    return a + b


model = OpenAILike(id="scripted", base_url=f"{os.environ['URL']}/v1", api_key="none")
agent = Agent(model=model, tools=[add], telemetry=False)
print("chat:", agent.run("Add the numbers.").content)
