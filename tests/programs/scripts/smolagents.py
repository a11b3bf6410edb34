import os

from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: float, b: float) -> float:
    """Add.

    Args:
        a: one number.
        b: another.
    """
    return a + b


model = OpenAIServerModel("scripted", api_base=f"{os.environ['URL']}/v1", api_key="none")
agent = ToolCallingAgent(tools=[add], model=model, verbosity_level=LogLevel.OFF)
print("chat:", agent.run("Add the numbers."))
