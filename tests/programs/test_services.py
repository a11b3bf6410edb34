"""Programs beside SDKs: an evaluation of the model, and a proxy in front of the server."""

from __future__ import annotations

import json
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.programs.running import bin_of, calls_in, end_group, environment_of, run, served
from tests.programs.table import Works
from tests.support.waiting import until
from trioserve.testing import ToolScript

pytestmark = pytest.mark.system

ANSWER = "The sum is 42."


@pytest.mark.parametrize(
    ("kind", "path", "flags"),
    [
        ("local-chat-completions", "/v1/chat/completions", ["--apply_chat_template"]),
        ("local-completions", "/v1/completions", []),
    ],
)
async def test_lm_eval(
    kind: str, path: str, flags: list[str], tmp_path: Path, works: Works
) -> None:
    data = tmp_path / "sums.json"
    data.write_text(json.dumps({"question": "Add the numbers.", "answer": ANSWER}))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 50},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))  # JSON is YAML, too
    program = bin_of("lm-eval")
    async with served(lambda prompt: f"{ANSWER}\nMore.") as server:
        options = "tokenizer_backend=None,tokenized_requests=False"
        model = f"model=scripted,base_url={server.url}{path},{options}"
        ended = await run(
            [str(program / "lm_eval"), "--model", kind, "--model_args", model, "--tasks", "sums",
             "--include_path", ".", *flags],
            folder=tmp_path,
            environ=environment_of("lm-eval", home=tmp_path, HF_HUB_OFFLINE="1"),
        )  # fmt: skip
    assert ended.code == 0, ended.output
    assert server.refused == [], calls_in(server.exchanges)
    [row] = [line for line in ended.output.splitlines() if line.startswith("|sums")]
    assert [cell.strip() for cell in row.split("|")][8] == "1"
    works("lm-eval", kind)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


NUMBER = {"type": "number"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
CALL = {"a": 1, "b": 2}
HELLO = [{"role": "user", "content": "Add the numbers."}]


async def test_litellm_as_a_proxy(tmp_path: Path, works: Works) -> None:
    port, program = free_port(), bin_of("litellm")
    script = ToolScript(steps=[("add", CALL)])
    async with served(script) as server, trio.open_nursery() as nursery:
        target = {
            "model": "openai/scripted",
            "api_base": f"{server.url}/v1",
            "api_key": "none",
        }
        config = {"model_list": [{"model_name": "local", "litellm_params": target}]}
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        command = [str(program / "litellm"), "--config", "config.yaml", "--port", str(port)]
        environ = environment_of(
            "litellm", home=tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_TELEMETRY="False"
        )
        process = await nursery.start(partial(run, command, folder=tmp_path, environ=environ))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await until(partial(lives, client))
            given = [await chat(client), await messages(client), await responses(client)]
        assert given == [CALL] * 3
        assert server.refused == [], calls_in(server.exchanges)
        end_group(process, signal.SIGTERM)
    works("litellm", "as a proxy (chat, messages, responses)")


async def lives(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/liveliness")).status_code == 200
    except httpx.ConnectError:
        return False


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json={"model": "local", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(client: httpx.AsyncClient) -> Any:
    function = {"name": "add", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    answer = await post(client, "/v1/chat/completions", messages=HELLO, tools=tools)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


async def messages(client: httpx.AsyncClient) -> Any:
    tools = [{"name": "add", "input_schema": SCHEMA}]
    answer = await post(client, "/v1/messages", messages=HELLO, tools=tools, max_tokens=500)
    [call] = [block for block in answer["content"] if block["type"] == "tool_use"]
    return call["input"]


async def responses(client: httpx.AsyncClient) -> Any:
    tools = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    answer = await post(client, "/v1/responses", input=HELLO, tools=tools)
    [call] = [item for item in answer["output"] if item["type"] == "function_call"]
    return json.loads(call["arguments"])
