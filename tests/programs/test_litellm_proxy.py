"""The LiteLLM proxy, in front of a server: a framework calls tools through it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from tests.programs.running import bin_of, calls_in, environment_of, run, served
from tests.programs.table import Works
from tests.programs.test_sdks import ANSWER, SCRIPT, SCRIPTS
from tests.support.prometheus import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.system

ENVIRON = {
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
            environ=environment_of("litellm", home=tmp_path, **ENVIRON),
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
