"""Sessions of thirty turns whose context fills several times: nothing of the task is lost."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.support.compacted import Model, serve
from trioserve.chat.compaction import TASK
from trioserve.testing.scripts import write_hermes

N_TURNS = 30
RESULT = "r" * 700
PROMPT = "Mind fact-one. Read thirty files."


class Reader(Model):
    """Reads a file a turn."""

    def __call__(self, prompt: str) -> str:
        """Write what follows the prompt."""
        if TASK in prompt:
            return super().__call__(prompt)
        self.prompts.append(prompt)
        return write_hermes([("read", {"file": f"f{self.n_turns}"})])

    @property
    def n_turns(self) -> int:
        return sum(TASK not in prompt for prompt in self.prompts)

    def check(self, cached: list[int]) -> None:
        """Check the prompts: each has the fact, and the last call with its result."""
        turns = [prompt for prompt in self.prompts if TASK not in prompt]
        assert len(turns) == N_TURNS
        assert len(self.prompts) - len(turns) >= 2
        for n, prompt in enumerate(turns):
            assert "fact-one" in prompt
            if n:
                assert prompt.count(f'"f{n}"') == 1
                assert f"{RESULT}{n}<" in prompt.replace("\n", "<")
            assert re.findall(r'"file": "f(\d+)"', prompt) == re.findall(rf"{RESULT}(\d+)", prompt)
        # Most of a prompt is that of the turn before.
        lengths = list(map(len, turns))
        assert sum(cached) > 0.6 * sum(lengths), list(zip(lengths, cached, strict=True))


async def respond(client: httpx.AsyncClient, model: Reader, *, asks: bool) -> list[int]:
    """Use the Responses API: as Codex, which asks for compactions, or with a threshold."""
    tool = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    items: list[Any] = [{"role": "user", "content": PROMPT}]
    cached = []
    managed = [] if asks else [{"type": "compaction", "compact_threshold": 5000}]
    body: dict[str, Any] = {"tools": [tool], "context_management": managed}
    while model.n_turns < N_TURNS:
        answer = await client.post("/v1/responses", json={**body, "input": items})
        assert answer.status_code == 200, answer.text
        response = answer.json()
        usage = response["usage"]
        cached.append(usage["input_tokens_details"]["cached_tokens"])
        items += response["output"]
        call_id = response["output"][-1]["call_id"]
        output = f"{RESULT}{model.n_turns}"
        items.append({"type": "function_call_output", "call_id": call_id, "output": output})
        if asks and usage["total_tokens"] > 5000 and model.n_turns < N_TURNS:
            trigger = {"type": "compaction_trigger"}
            answer = await client.post("/v1/responses", json={**body, "input": [*items, trigger]})
            assert answer.status_code == 200, answer.text
            (compaction,) = answer.json()["output"]
            items = [one for one in items if one.get("role") == "user"] + [compaction]
    return cached


async def message(client: httpx.AsyncClient, model: Reader, edit: dict[str, Any]) -> list[int]:
    """Use Anthropic's API with an edit, and send everything again each time."""
    tool = {"name": "read", "input_schema": {"type": "object"}}
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    cached = []
    trigger = {"type": "input_tokens", "value": 5000}
    managed = {"edits": [{**edit, "trigger": trigger}]}
    body: dict[str, Any] = {"tools": [tool], "max_tokens": 200, "context_management": managed}
    while model.n_turns < N_TURNS:
        answer = await client.post("/v1/messages", json={**body, "messages": messages})
        assert answer.status_code == 200, answer.text
        given = answer.json()
        messages.append({"role": "assistant", "content": given["content"]})
        if given["stop_reason"] == "compaction":
            continue
        cached.append(given["usage"]["cache_read_input_tokens"])
        (use,) = (one for one in given["content"] if one["type"] == "tool_use")
        output = f"{RESULT}{model.n_turns}"
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": output}
        messages.append({"role": "user", "content": [result]})
    return cached


@pytest.mark.system
@pytest.mark.parametrize("asks", [True, False], ids=["trigger", "threshold"])
async def test_responses(asks: bool) -> None:
    model = Reader()
    async with serve(model) as client:
        model.check(await respond(client, model, asks=asks))


@pytest.mark.system
@pytest.mark.parametrize("pauses", [True, False], ids=["pause", "at once"])
async def test_messages(pauses: bool) -> None:
    model = Reader()
    edit = {"type": "compact_20260112", "pause_after_compaction": pauses}
    async with serve(model) as client:
        model.check(await message(client, model, edit))


async def test_a_call_that_is_open_when_the_context_is_compacted() -> None:
    """Of two calls, one has a result; the other gets it after the compaction."""
    model = Model()
    made = {"type": "function_call", "name": "read"}
    calls = [{**made, "call_id": f"c{n}", "arguments": json.dumps({"n": n})} for n in range(2)]
    results = [
        {"type": "function_call_output", "call_id": f"c{n}", "output": f"{RESULT}{n}"}
        for n in range(2)
    ]
    items = [{"role": "user", "content": PROMPT}, *calls, results[0]]
    async with serve(model, n_ctx=4096) as client:
        asked = {"input": [*items, {"type": "compaction_trigger"}]}
        (compaction,) = (await client.post("/v1/responses", json=asked)).json()["output"]
        again = {"input": [items[0], compaction, results[1]]}
        answer = await client.post("/v1/responses", json=again)
        assert answer.status_code == 200
    prompt = model.prompts[-1]
    assert prompt.index('"n": 1') < prompt.index(f"{RESULT}1")
    assert "Summary: fact-one" in prompt
