"""Talk to trioserve with OpenAI's own SDK: ``pip install openai``, ``make serve``, and this.

python examples/client_openai.py [http://127.0.0.1:8080/v1]
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def whole(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=64,
    )
    print("whole:   ", answer.choices[0].message.content)


def streamed(client: OpenAI) -> None:
    print("streamed: ", end="")
    stream = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": "Count from 1 to 10"}],
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"   ({chunk.usage.completion_tokens} tokens)")


def stopped_early(client: OpenAI) -> None:
    print("stopped:  ", end="")
    with client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": "Tell me a long story."}],
        max_tokens=2000,
        stream=True,
    ) as stream:
        for i, chunk in enumerate(stream):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
            if i == 30:
                break  # leaving the block closes the connection, which frees the slot
    print(" ...")


def tool_call(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        temperature=0,
        max_tokens=128,
    )
    message = answer.choices[0].message
    for call in message.tool_calls or []:
        if call.type == "function":
            print("tool:    ", call.function.name, json.loads(call.function.arguments))
    if not message.tool_calls:
        print("tool:     none was called; the model said:", message.content)


def main() -> None:
    client = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    whole(client)
    streamed(client)
    stopped_early(client)
    tool_call(client)


if __name__ == "__main__":
    main()
