"""Commands that a model has run, end to end: over sockets, and until nothing is left of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_fleet import routed
from tests.support.http_server import connected, post, serving_script
from tests.support.processes import until
from tests.support.run_stream import CHATS, RUN, STREAM, reading
from tests.support.scripts import answering
from trioserve.testing import ScriptedBackend

pytestmark = pytest.mark.system

ALL = {"trioserve_run_tools": {"approval": "all"}}


def commanding(*commands: str) -> ScriptedBackend:
    """A model that has commands run, and then answers."""
    calls = [
        {"name": "exec_shell_command", "arguments": {"command": each, "timeout": 60}}
        for each in commands
    ]
    made = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    return answering(lambda prompt: "Done." if "<tool_response>" in prompt else made, n_slots=4)


def sleeping(mark: str) -> ScriptedBackend:
    return commanding(f"sleep {mark} & setsid sleep {mark} & sleep {mark}", f"sleep {mark}")


def with_commands(folder: Path) -> dict[str, Any]:
    return {"tools": ("exec_shell_command",), "tools_dir": (str(folder),)}


async def test_a_client_that_leaves_ends_the_commands(tmp_path: Path) -> None:
    mark = f"2000.{os.getpid()}"
    async with serving_script(sleeping(mark), **with_commands(tmp_path)) as (url, service):
        seconds = []
        for path in (CHATS, "/v1/responses", CHATS):
            body = json.dumps({**STREAM, "input": "Hi", **ALL}).encode()
            async with connected(url) as connection:
                await connection.send_all(post(path, body))
                await until(mark, 4)
            seconds.append(await until(mark, 0))
        assert min(seconds) < 0.1
        await service.n_answering.wait_value(0)


async def test_a_command_that_is_approved_and_stopped_behind_a_router(tmp_path: Path) -> None:
    mark = f"2002.{os.getpid()}"
    backends = {"one": answering("Hi"), "two": commanding(f"sleep {mark}"), "three": None}
    async with (
        routed(backends, **with_commands(tmp_path)) as router,
        reading(router.url, model="two") as events,
    ):
        id_, needed = await events.until("approval")
        unknown = {"call_id": "call_none", "approve": True}
        answer = await router.client.post(f"{CHATS}/{id_}/approve", json=unknown)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "tool_call_not_found")
        given = {"call_id": needed["call_id"], "approve": True}
        for name, status in (("chatcmpl-none", 404), (id_, 200), (id_, 409)):
            answer = await router.client.post(f"{CHATS}/{name}/approve", json=given)
            assert answer.status_code == status
        await until(mark, 1)
        answer = await router.client.post(f"{CHATS}/{id_}/stop", json=given)
        assert answer.json() == {"success": True}
        await until(mark, 0)
        _, result = await events.until("result")
        assert result["stopped"]
        _, end = await events.until("end")
        assert end["reason"] == "answer"


async def test_a_client_that_leaves_a_router_ends_the_commands(tmp_path: Path) -> None:
    mark = f"2003.{os.getpid()}"
    async with routed({"one": sleeping(mark)}, **with_commands(tmp_path)) as router:
        async with reading(router.url, **ALL) as events:
            await events.until("started")
            await until(mark, 4)
        await until(mark, 0)


async def test_the_request_names_the_folder_and_the_place(tmp_path: Path) -> None:
    inside, fenced = tmp_path / "inside", with_commands(tmp_path)
    inside.mkdir()
    async with (
        serving_script(commanding("pwd"), **fenced) as (url, _),
        httpx.AsyncClient(base_url=url) as client,
    ):

        async def ask(**more: str) -> dict[str, Any]:
            body = {**RUN, "trioserve_run_tools": {"approval": "all", **more}}
            answer: dict[str, Any] = (await client.post(CHATS, json=body)).json()
            return answer

        for more, folder in (
            ({}, tmp_path),
            ({"cwd": ""}, tmp_path),
            ({"cwd": str(inside)}, inside),
        ):
            result = (await ask(**more))["trioserve_messages"][1]["content"]
            assert result.splitlines()[0] == str(folder)
        for name, value, why in (
            ("cwd", "/", "--tools-dir"),
            ("cwd", str(tmp_path / "no"), "is not a directory"),
            ("runtime", "moon", "unknown tool runtime: moon"),
            ("runtime", "ssh:-x", "invalid ssh target"),
        ):
            error = (await ask(**{name: value}))["error"]
            assert (error["code"], error["param"]) == (400, f"trioserve_run_tools.{name}")
            assert why in error["message"]
