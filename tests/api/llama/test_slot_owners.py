"""Slots with several API keys: each sees, saves and controls what is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients import client_and_service, client_of, client_of_app
from tests.support.scripts import HI, endless
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.testing import ScriptedBackend

KEYS = ("key-of-the-first", "key-of-the-other")
FIRST, OTHER = ({"Authorization": f"Bearer {key}"} for key in KEYS)

PROMPT = "The password of the first one is long enough to be worth a place in the cache: "
BODY = {"prompt": PROMPT, "n_predict": 4, "temperature": 0, "id_slot": 0}


async def act(
    client: httpx.AsyncClient, action: str, headers: dict[str, str] | None = None, slot: int = 0
) -> httpx.Response:
    body = {"filename": "one.bin"}
    return await client.post(f"/slots/{slot}?action={action}", json=body, headers=headers)


async def n_cached(client: httpx.AsyncClient, headers: dict[str, str] | None = None) -> int:
    answer = await client.post("/completion", json=BODY, headers=headers)
    return int(answer.json()["timings"]["cache_n"])


# -- what is shown


async def test_a_slot_shows_other_owners_only_numbers() -> None:
    backend = ScriptedBackend(lambda prompt: "one\ntwo", n_slots=1)
    async with client_of(backend, api_keys=KEYS, metrics_endpoint=True) as client:
        await client.post("/completion", json=BODY | {"top_k": 7}, headers=FIRST)
        (own,) = (await client.get("/slots", headers=FIRST)).json()
        (seen,) = (await client.get("/slots", headers=OTHER)).json()
        metrics = await client.get("/metrics", headers=OTHER)
    assert own["params"]["top_k"] == 7
    assert seen == {
        **{name: value for name, value in own.items() if name != "params"},
        "next_token": [{"has_next_token": False, "n_decoded": 0}],
    }
    assert "password" not in metrics.text
    assert not any(key in metrics.text for key in KEYS)


async def test_where_all_share_all_is_shown() -> None:
    async with client_of(api_keys=KEYS, cache_sharing="all") as client:
        await client.post("/completion", json=BODY, headers=FIRST)
        own, seen = [(await client.get("/slots", headers=key)).json() for key in (FIRST, OTHER)]
    assert own == seen
    assert "params" in seen[0]


# -- save, restore, erase


async def test_a_slot_is_saved_and_erased_by_its_owner(tmp_path: Path) -> None:
    async with client_of(api_keys=KEYS, slot_save_path=str(tmp_path)) as client:
        await client.post("/completion", json=BODY, headers=FIRST)
        for action in ("save", "erase"):
            answer = await act(client, action, OTHER)
            assert answer.status_code == 403
            assert answer.json()["error"] == {
                "code": 403,
                "message": "The slot holds the text of another API key.",
                "type": "permission_error",
                "param": None,
            }
        assert not list(tmp_path.iterdir())
        assert (await act(client, "save", FIRST)).json()["n_saved"] > len(PROMPT)
        assert (await act(client, "erase", FIRST)).json()["n_erased"] > len(PROMPT)
        assert (await act(client, "erase", OTHER)).json()["n_erased"] == 0  # it has no owner now


async def test_a_file_is_restored_by_the_key_that_saved_it(tmp_path: Path) -> None:
    """With llama.cpp and the bundled model, and by another server."""
    config = Config(ctx_size=512, threads=1, api_keys=KEYS, slot_save_path=str(tmp_path))
    async with client_of_app(create_app(config)) as client:
        await client.post("/completion", json=BODY, headers=FIRST)
        n_saved = (await act(client, "save", FIRST)).json()["n_saved"]
    written = (tmp_path / "one.bin").read_bytes()
    assert not any(key.encode() in written for key in KEYS)
    async with client_of_app(create_app(config)) as client:
        answer = await act(client, "restore", OTHER)
        assert answer.status_code == 403
        assert answer.json()["error"]["message"] == "The file was not saved with this API key."
        assert await n_cached(client, OTHER) == 0
        body = BODY | {"id_slot": 2}
        await client.post("/completion", json=body, headers=OTHER)
        answer = await act(client, "save", OTHER, slot=2)
        assert answer.status_code == 403
        assert answer.json()["error"]["message"].startswith("There is a file of that name")
        assert (tmp_path / "one.bin").read_bytes() == written
        assert (await act(client, "restore", FIRST, slot=1)).json()["n_restored"] == n_saved
        assert (await act(client, "save", FIRST, slot=1)).json()["n_saved"] == n_saved
        assert (await act(client, "save", OTHER, slot=1)).status_code == 403
        assert await n_cached(client, FIRST) > 10


async def test_a_file_without_an_owner(tmp_path: Path) -> None:
    """Files of llama-server name no owner, so keys that do not share cannot restore them."""
    config: dict[str, Any] = {"ctx_size": 512, "threads": 1, "slot_save_path": str(tmp_path)}
    async with client_of_app(create_app(Config(**config))) as client:
        await client.post("/completion", json=BODY)
        n_saved = (await act(client, "save")).json()["n_saved"]
    path = tmp_path / "one.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'{"lora"')])
    async with client_of_app(create_app(Config(**config, api_keys=KEYS))) as client:
        assert (await act(client, "restore", FIRST)).status_code == 403
        await client.post("/completion", json=BODY | {"n_predict": 1}, headers=FIRST)
        path.write_bytes(whole[:5])
        assert (await act(client, "save", FIRST)).json()["n_saved"] < n_saved  # no owner now
    path.write_bytes(whole[: whole.rindex(b'{"lora"')])
    shared = Config(**config, api_keys=KEYS, cache_sharing="all")
    for each in (Config(**config), shared):
        async with client_of_app(create_app(each)) as client:
            answer = await act(client, "restore", FIRST)
            assert answer.json()["n_restored"] == n_saved
            assert await n_cached(client, OTHER) > 10


async def test_a_salt_goes_into_the_file_and_comes_out_of_it(tmp_path: Path) -> None:
    async with client_and_service(slot_save_path=str(tmp_path)) as (client, service):
        await client.post("/completion", json=BODY | {"cache_salt": "pepper"})
        await act(client, "save")
        assert "pepper" not in (tmp_path / "one.bin").read_text()
        await act(client, "erase")
        await act(client, "restore")
        server = service.server
        found = [
            (await server.complete(PROMPT, max_tokens=1, cache_salt=salt)).finished.timings.cache_n
            for salt in ("", "pepper")
        ]
    assert found[0] == 0
    assert found[1] > len(PROMPT) - 2


# -- running answers


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
async def test_a_running_answer_is_controlled_by_the_key_that_asked(route: str) -> None:
    backend = endless()
    body = {"messages": HI, "input": "Hi", "stream": True, "reasoning_control": True}
    async with (
        client_of(backend, api_keys=KEYS) as client,
        client.stream("POST", route, json=body, headers=FIRST) as response,
    ):
        received = response.aiter_lines()
        first = ""
        while not first.startswith("data: "):
            first = await anext(received)
        shown = json.loads(first.removeprefix("data: "))
        id_ = shown["id"] if "id" in shown else shown["response"]["id"]
        for headers, success in ((OTHER, False), (FIRST, True)):
            answer = await client.post(
                "/v1/chat/completions/control",
                json={"id": id_, "action": "cancel"},
                headers=headers,
            )
            assert answer.json()["success"] is success
            if not success:
                assert answer.json()["message"] == "no active completion for this id"
                await anext(received)  # not cancelled
        assert "cancelled" in "".join([line async for line in received])
