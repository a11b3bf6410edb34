import os

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: float, b: float) -> float:
    """Add."""
    return a + b


arguments = {"base_url": f"{os.environ['URL']}/v1", "api_key": "none"}
model = OpenAIModel(client_args=arguments, model_id="scripted")
print("chat:", Agent(model=model, tools=[add], callback_handler=None)("Add the numbers."))
