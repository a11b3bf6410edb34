import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be downloaded

import litellm

URL = os.environ["URL"]
NUMBER = {"type": "number"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}

for model, base in (
    ("openai/scripted", f"{URL}/v1"),
    ("anthropic/scripted", URL),
    ("ollama_chat/scripted", URL),
):
    messages = [{"role": "user", "content": "Add the numbers."}]
    while True:
        answer = litellm.completion(
            model, messages, tools=[TOOL], api_base=base, api_key="none", max_tokens=500
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            print(f"{model}:", message.content)
            break
        messages.append(message.model_dump())
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
