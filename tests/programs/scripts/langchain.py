import os

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

URL = os.environ["URL"]


def add(a: float, b: float) -> float:
    """Add."""
    return a + b


models = {
    "openai": ChatOpenAI(model="scripted", base_url=f"{URL}/v1", api_key="none", streaming=True),
    "openai responses": ChatOpenAI(
        model="scripted", base_url=f"{URL}/v1", api_key="none", use_responses_api=True
    ),
    "anthropic": ChatAnthropic(model="scripted", base_url=URL, api_key="none", streaming=True),
    "ollama": ChatOllama(model="scripted", base_url=URL),
}
for name, model in models.items():
    agent = create_agent(model, [add])
    result = agent.invoke({"messages": [{"role": "user", "content": "Add the numbers."}]})
    print(f"{name}:", result["messages"][-1].text)
