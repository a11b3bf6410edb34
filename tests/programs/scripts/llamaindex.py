import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: float, b: float) -> float:
    """Add."""
    return a + b


async def main() -> None:
    llm = OpenAILike(
        model="scripted",
        api_base=f"{os.environ['URL']}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=100_000,
    )
    print("chat:", await FunctionAgent(tools=[add], llm=llm).run("Add the numbers."))


asyncio.run(main())
