"""SDKs and frameworks: a script of each lets the model call a tool three times."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from tests.programs.running import bin_of, calls_in, environment_of, run, served
from tests.programs.table import Works
from tests.support.prometheus import free_port
from tests.support.waiting import until
from trioserve.testing import ToolScript
from trioserve.testing.scripts import Call

pytestmark = pytest.mark.system

SCRIPTS = Path(__file__).parent / "scripts"
ANSWER = "The sum is 42."
STEPS = [("add", {"a": a, "b": b}) for a, b in ((1, 2), (3, 4), (7, 35))]
FINAL_ANSWER = ("final_answer", {"answer": ANSWER})
IN_JSON = f'{{"text": "{ANSWER}"}}'


def write_fields(calls: Sequence[Call]) -> str:
    """Write a call as DSPy asks for it."""
    [(name, arguments)] = calls
    fields = {"next_thought": "Hm.", "next_tool_name": name, "next_tool_args": arguments}
    said = (f"[[ ## {field} ## ]]\n{json.dumps(value)}" for field, value in fields.items())
    return "\n\n".join([*said, "[[ ## completed ## ]]"])


SCRIPT = ToolScript(steps=STEPS, answer=ANSWER, aside=IN_JSON)
#: Of programs that want the answer in another way than as text after calls of tools.
SCRIPTS_OF = {
    "dspy": ToolScript(
        steps=[*STEPS, ("finish", {})],
        aside=f"[[ ## reasoning ## ]]\nHm.\n\n[[ ## text ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]",
        write=write_fields,
        tools_mark="[[ ## next_tool_name ## ]]",
        result_mark="[[ ## observation_",
    ),
    "guidance": lambda prompt: f"<think>\nHm.\n</think>\n\n{ANSWER}",
    "instructor": ToolScript(steps=[("Answer", {"text": ANSWER})], aside=IN_JSON),
    "smolagents": ToolScript(steps=[*STEPS, FINAL_ANSWER], result_mark="Observation:\n"),
}


@pytest.mark.parametrize("path", sorted(SCRIPTS.iterdir()), ids=lambda path: path.name)
async def test_a_model_calls_tools(path: Path, tmp_path: Path, works: Works) -> None:
    name = path.stem
    commands = bin_of(name)
    script = tmp_path / f"script{path.suffix}"  # under another name than the packages have
    shutil.copy(path, script)
    if path.suffix == ".mjs":
        (tmp_path / "node_modules").symlink_to(commands.parent)  # where Node.js looks for packages
        command = ["node", str(script)]
    else:
        command = [str(commands / "python"), str(script)]
    async with served(SCRIPTS_OF.get(name, SCRIPT)) as server:
        environ = environment_of(name, home=tmp_path, URL=server.url)
        ended = await run(command, folder=tmp_path, environ=environ)
    refused = [one for one in server.refused if "thread_unsupported_request" not in one.answer]
    assert refused == [], calls_in(server.exchanges)
    assert ended.code == 0, ended.output
    ways = re.findall(f"^(.+): {re.escape(ANSWER)}$", ended.output, re.MULTILINE)
    assert ways, ended.output
    assert len(ways) == ended.output.count(ANSWER), "an answer has more than its text"
    assert ended.wanted == set()
    works(name, f"calls tools ({', '.join(ways)})")


PROXY_ENVIRON = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be downloaded
    # Without a key for its administration, it does not start otherwise.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "True",
}


async def lives(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/liveliness")).status_code == 200
    except httpx.TransportError:
        return False


async def test_the_litellm_proxy(tmp_path: Path, works: Works) -> None:
    proxy, agents = bin_of("litellm"), bin_of("pydanticai")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with served(SCRIPT) as server, trio.open_nursery() as nursery:
        parameters = {"model": "openai/scripted", "api_base": f"{server.url}/v1", "api_key": "none"}
        models = [{"model_name": "scripted", "litellm_params": parameters}]
        (tmp_path / "proxy.yaml").write_text(json.dumps({"model_list": models}))  # JSON is YAML
        flags = ["--config", "proxy.yaml", "--host", "127.0.0.1", "--port", str(port)]
        started = partial(
            run,
            [str(proxy / "litellm"), *flags, "--telemetry", "False"],
            folder=tmp_path,
            environ=environment_of("litellm", home=tmp_path, **PROXY_ENVIRON),
        )
        await nursery.start(started)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            await until(partial(lives, client))
        ended = await run(
            [str(agents / "python"), str(SCRIPTS / "pydanticai.py")],
            folder=tmp_path,
            environ=environment_of("pydanticai", home=tmp_path, URL=url),
        )
        nursery.cancel_scope.cancel()
    assert ended.code == 0, ended.output
    assert server.refused == [], calls_in(server.exchanges)
    assert ended.output.count(ANSWER) == 3, ended.output
    works("litellm", "as a proxy (chat, responses, anthropic)")
