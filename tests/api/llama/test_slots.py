"""Slots over HTTP: what they do, and what they have computed, to a file and back."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.support.clients import client_and_service, client_of, client_of_app, error_body
from tests.support.lora_files import make_lora
from tests.support.media_files import image_file
from tests.support.waiting import patiently
from trioserve import Image, MixedPrompt
from trioserve.api.service import Service
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.engine import DecodeMaximal, Engine
from trioserve.errors import ConfigError, InvalidRequestError, KVCacheFullError
from trioserve.llama import backend as backend_module, load, state_file
from trioserve.server import Server
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.types import AdapterInfo, CacheRoot, GenerationParams, Prompt, SlotState, Task

PROMPT = "Once upon a time there was a little girl who"
GREEDY = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "id_slot": 0}


def served(**config: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """The bundled model."""
    return client_of_app(create_app(Config(ctx_size=512, threads=1, **config)))


def scripted(
    directory: Path, backend: ScriptedBackend | None = None, **config: Any
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, Service]]:
    return client_and_service(backend, slot_save_path=str(directory), **config)


async def act(
    client: httpx.AsyncClient, slot: int | str, action: str, filename: str = "one.bin"
) -> dict[str, Any]:
    body = None if action == "erase" else {"filename": filename}
    answer = await client.post(f"/slots/{slot}?action={action}", json=body)
    assert answer.status_code == 200, answer.text
    written: dict[str, Any] = answer.json()
    return written


# -- GET /slots


async def test_an_idle_slot_tells_of_its_last_request(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda prompt: "one\ntwo", n_slots=1)
    async with scripted(tmp_path, backend) as (client, _):
        (fresh,) = (await client.get("/slots?fail_on_no_slot=1")).json()
        assert "id_task" not in fresh and "next_token" not in fresh
        await client.post("/completion", json={"prompt": "abc", "n_predict": 5, "top_k": 7})
        (slot,) = (await client.get("/slots")).json()
    assert slot["is_processing"] is False
    assert slot["id_task"] == 1
    assert slot["n_prompt_tokens"] == 7  # all that it holds: the last token was not decoded
    assert slot["n_prompt_tokens_processed"] == slot["n_prompt_tokens_cache"] == 0
    assert slot["params"]["top_k"] == 7
    assert slot["next_token"] == [
        {"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}
    ]


@pytest.mark.system
async def test_a_slot_tells_that_it_waits_for_an_image(tmp_path: Path) -> None:
    projector = ScriptedProjector()
    projector.gate.clear()
    backend = ScriptedBackend(n_slots=1, projector=projector)
    async with (
        scripted(tmp_path, backend) as (client, service),
        service.server.stream_complete(MixedPrompt([Image(image_file()), "?"])) as stream,
    ):
        try:
            with patiently():
                while not (await client.get("/slots")).json()[0]["encoding"]:
                    await trio.lowlevel.checkpoint()
        finally:
            projector.gate.set()
        await stream.read()
        assert (await client.get("/slots")).json()[0]["encoding"] is False


async def test_a_busy_slot_tells_of_new_lines(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda prompt: "one\ntwo" + "x" * 10**5, n_slots=1, n_ctx=2**17)
    async with (
        scripted(tmp_path, backend) as (client, service),
        service.server.stream_complete("abc", max_tokens=90_000) as stream,
    ):
        async for _ in stream:
            if stream.mailbox.n_output > 4:
                break
        (slot,) = (await client.get("/slots")).json()
        answer = await client.get("/slots?fail_on_no_slot=1")
    assert slot["n_prompt_tokens"] == 3
    token = slot["next_token"][0]
    assert token["has_next_token"] and token["has_new_line"]
    assert token["n_remain"] == 90_000 - token["n_decoded"]
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no slot available"


# -- save, restore, erase


async def test_another_server_restores_a_saved_slot(tmp_path: Path) -> None:
    async with served(slot_save_path=str(tmp_path)) as client:
        first = (await client.post("/completion", json=GREEDY)).json()
        n_held = first["tokens_evaluated"] + 7
        saved = await act(client, 0, "save")
        assert saved.keys() == {"id_slot", "filename", "n_saved", "n_written", "timings"}
        assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "one.bin", n_held)
        assert saved["n_written"] == (tmp_path / "one.bin").stat().st_size > 1000 * n_held
        assert saved["timings"]["save_ms"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["one.bin"]
    async with served(slot_save_path=str(tmp_path)) as client:
        restored = await act(client, 3, "restore")
        assert restored.keys() == {"id_slot", "filename", "n_restored", "n_read", "timings"}
        assert (restored["n_restored"], restored["n_read"]) == (n_held, saved["n_written"])
        assert restored["timings"]["restore_ms"] > 0
        again = (await client.post("/completion", json=GREEDY)).json()
        assert again["content"] == first["content"]
        assert again["timings"]["cache_n"] == first["tokens_evaluated"] - 1


async def test_a_file_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(slot_save_path=str(tmp_path)) as client:
        await client.post("/completion", json=GREEDY)
        await act(client, 0, "save")
        path, body = tmp_path / "one.bin", {"filename": "one.bin"}
        whole = path.read_bytes()
        no_fit = "The saved state does not fit this model's context: "
        for content, why in (
            (whole[:100], "the file is cut short."),
            (whole[: len(whole) // 2], no_fit),
            (whole[:-1], f"{no_fit}there are bytes after"),
            (
                whole[:24] + b"\xff\xff\xff\x7f" + whole[28 : whole.rindex(b'{"lora"')],
                "the file is from a model with another vocabulary",  # one of llama-server's
            ),
            (
                whole[: len(whole) // 2] + b"!!!" + whole[len(whole) // 2 + 3 :],
                "the file is damaged: its checksum is wrong.",
            ),
        ):
            path.write_bytes(content)
            error = await error_of(client, "/slots/1?action=restore", json=body)
            assert (error["code"], error["param"]) == (400, "filename")
            assert error["message"].startswith(f"Unable to restore slot: {why}")
        path.write_bytes(whole)
        monkeypatch.setattr(backend_module, "free_memory", lambda: 1000)
        error = await error_of(client, "/slots/1?action=restore", json=body)
        assert error["message"].endswith("is larger than the memory that is free.")
        monkeypatch.undo()
        assert (await act(client, 1, "restore"))["n_restored"] > 0


async def test_a_slot_without_text(tmp_path: Path) -> None:
    async with served(slot_save_path=str(tmp_path), cache_ram=0) as client:
        assert await act(client, 0, "erase") == {"id_slot": 0, "n_erased": 0}
        saved = await act(client, 1, "save")  # of a slot that has done nothing
        restored = await act(client, 2, "restore")
        assert saved["n_saved"] == restored["n_restored"] == 0
        assert restored["n_read"] == saved["n_written"]
        first = (await client.post("/completion", json=GREEDY)).json()
        n_held = first["tokens_evaluated"] + 7
        assert await act(client, 0, "erase") == {"id_slot": 0, "n_erased": n_held}
        assert await act(client, 0, "erase") == {"id_slot": 0, "n_erased": 0}
        again = (await client.post("/completion", json=GREEDY)).json()
        assert again["timings"]["cache_n"] == 0


async def test_a_slot_that_left_the_kv_cache_is_saved_from_ram(tmp_path: Path) -> None:
    backend = ScriptedBackend(n_slots=1, n_ctx=100)
    async with scripted(tmp_path, backend) as (client, service):
        await client.post("/completion", json={"prompt": "a" * 40})
        async with service.server.stream_complete("b" * 49) as stream:  # the other one has to go
            assert (await stream.__anext__()) is not None
        # The slot's last text is the second one now; the first is in RAM alone.
        scheduler = service.server.lifecycle.services.loop._scheduler
        found = scheduler.cache.save([97] * 40 + [65] * 30, CacheRoot())
        assert len(found.keys) > 32
        assert (await act(client, 0, "save"))["n_saved"] >= 49


async def test_a_busy_slot_is_waited_for(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 10**5, n_slots=2, n_ctx=2**17)
    async with scripted(tmp_path, backend, unread_tokens=8) as (client, service):
        saved: list[dict[str, Any]] = []

        async def save() -> None:
            saved.append(await act(client, 0, "save"))

        request = service.server.stream_complete("abc", id_slot=0)
        async with trio.open_nursery() as nursery, request as stream:
            await stream.__anext__()
            nursery.start_soon(save)
            assert await act(client, 1, "erase") == {"id_slot": 1, "n_erased": 0}
            assert not saved
        assert saved[0]["n_saved"] > 3


async def test_a_client_that_does_not_wait_erases_nothing(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 10**5, n_slots=1, n_ctx=2**17)
    async with scripted(tmp_path, backend, unread_tokens=8) as (_, service):
        async with service.server.stream_complete("abc") as stream:
            await stream.__anext__()
            with trio.move_on_after(0.01) as scope:
                await service.server.erase_slot(0)
            assert scope.cancelled_caught
        assert await service.server.erase_slot(0) > 3


# -- errors


async def error_of(client: httpx.AsyncClient, path: str, **kwargs: Any) -> dict[str, Any]:
    answer = await client.post(path, **kwargs)
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    assert isinstance(error, dict)
    return error


async def test_without_a_directory() -> None:
    message = "This server does not support slots action. Start it with `--slot-save-path`"
    async with client_of() as client:
        for action in ("save", "restore", "erase", "fly"):
            answer = await client.post(f"/slots/0?action={action}", json={"filename": "a"})
            assert (answer.status_code, answer.json()) == (
                501,
                error_body(message, None, status=501),
            )


async def test_a_slot_or_an_action_that_is_none(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (client, _):
        for path, message, param in (
            ("/slots/x?action=save", "Invalid slot ID", "id_slot"),
            ("/slots/-1?action=save", "Invalid slot ID", "id_slot"),
            ("/slots/2?action=save", "Invalid slot ID", "id_slot"),
            ("/slots/2?action=erase", "Invalid slot ID", "id_slot"),
            (f"/slots/{'9' * 5000}?action=erase", "Invalid slot ID", "id_slot"),
            ("/slots/0?action=fly", "Invalid action", "action"),
            ("/slots/0", "Invalid action", "action"),
        ):
            error = await error_of(client, path, json={"filename": "a"})
            assert (error["code"], error["message"], error["param"]) == (400, message, param)


NO_NAMES = [
    *(
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "a\\b",
        "a..b",
        " a",
        "a ",
        "a.",
        "a:b",
        "a\n",
        "a\0",
        "é" * 128,
    ),
    *("*", "?", '"', "<", ">", "|", "\x7f", "\x85"),
    *("\u2215", "\u2216", "\uff0e", "\ufeff", "\ufffd"),
]


async def test_a_name_that_is_none(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (client, _):
        for action in ("save", "restore"):
            for name in NO_NAMES:
                path = f"/slots/0?action={action}"
                error = await error_of(client, path, json={"filename": name})
                assert (error["code"], error["param"]) == (400, "filename"), name
                assert error["message"] == "Invalid filename"
        for body in ({}, {"filename": 5}, {"filename": None}):
            error = await error_of(client, "/slots/0?action=save", json=body)
            assert (error["code"], error["param"]) == (400, "filename")
    assert not list(tmp_path.iterdir())


async def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    directory = tmp_path / "slots"
    directory.mkdir()
    async with scripted(directory) as (client, _):
        path = "/slots/0?action=restore"
        error = await error_of(client, path, json={"filename": "none"})
        assert (error["code"], error["param"]) == (400, "filename")
        assert error["message"].startswith("Unable to restore slot: the file cannot be read: No")
        (directory / "a").mkdir()
        error = await error_of(client, path, json={"filename": "a"})
        assert error["message"].startswith("Unable to restore slot: the file cannot be read: Is")
        (directory / "a").rmdir()
        directory.rmdir()
        error = await error_of(client, "/slots/0?action=save", json={"filename": "a"})
        assert (error["code"], error["type"]) == (500, "server_error")
        wanted = r"Unable to save slot\. The log has more, under \w+\."
        assert re.fullmatch(wanted, error["message"])


def test_a_cache_without_room() -> None:
    backend = ScriptedBackend(n_slots=2, n_ctx=100)
    engine = Engine(backend, DecodeMaximal(), lambda: None)
    one, other = engine._scheduler.slots
    engine.submit(Task(1, Prompt((97,) * 40), GenerationParams(id_slot=0)))
    while engine.step():
        pass
    saved = engine.save_slot(0, "")
    assert len(saved.keys) == 80
    engine.submit(Task(2, Prompt((98,) * 40), GenerationParams(id_slot=1)))
    engine.step()
    assert other.request is not None
    with pytest.raises(KVCacheFullError, match="no room"):
        engine.restore_slot(0, saved)
    while engine.step():
        pass
    engine.restore_slot(0, saved)
    engine.check_integrity()
    assert one.kept == list(saved.keys)


async def test_no_room_is_a_bad_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise KVCacheFullError("The KV cache has no room.")

    monkeypatch.setattr(Engine, "restore_slot", refuse)
    async with scripted(tmp_path) as (client, _):
        await act(client, 0, "save")
        body = {"filename": "one.bin"}
        error = await error_of(client, "/slots/0?action=restore", json=body)
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert error["message"] == "Unable to restore slot: The KV cache has no room."


def test_the_directory_is_checked_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        Config(slot_save_path=str(tmp_path / "none"))


# -- files


def saved_state(tmp_path: Path) -> tuple[Path, bytes]:
    with load(Config(ctx_size=256, threads=1)) as backend:
        for pos, token in enumerate((5, 6, 7)):
            backend.batch.clear()
            backend.batch.add(token, pos, 0, logits=False)
            backend.decode()
        path = tmp_path / "state"
        saved = SlotState(keys=(5, 6, 7), state=backend.memory.save(0))
        assert backend.write_state(path, saved) == path.stat().st_size
        assert backend.read_state(path, ((0, 1.0),)) == (saved, path.stat().st_size)
    return path, path.read_bytes()


def test_every_cut_and_every_other_file_is_refused(tmp_path: Path) -> None:
    path, whole = saved_state(tmp_path)
    with load(Config(ctx_size=256, threads=1)) as backend:
        for length in [*range(80), len(whole) // 2, len(whole) - 1]:
            path.write_bytes(whole[:length])
            with pytest.raises(InvalidRequestError):
                backend.memory.restore(1, backend.read_state(path, ())[0].state)
            assert backend.memory.last(1) == -1
        for content in (b"GGUF" * 100, whole[:12] + b"\xff\xff\xff\x7f" * 20, b"\0" * 10**4):
            path.write_bytes(content)
            with pytest.raises(InvalidRequestError, match="Unable to restore slot"):
                backend.read_state(path, ())


def test_files_that_others_wrote(tmp_path: Path) -> None:
    path, whole = saved_state(tmp_path)
    note = whole.rindex(b'{"lora"')
    words = 4 + 3  # a mark, a version, a length, the tokens, and no media
    state = whole[12 + 4 * words : note]
    with load(Config(ctx_size=256, threads=1)) as backend:
        path.write_bytes(whole[:note])  # as llama-server's, without a note
        saved, _ = backend.read_state(path, ((0, 0.5),))
        assert (saved.keys, saved.root.adapters) == ((5, 6, 7), ((0, 0.5),))
        backend.memory.restore(1, saved.state)
        assert backend.memory.last(1) == 2
        # A list of tokens as older versions wrote it:
        path.write_bytes(whole[:8] + (3).to_bytes(4, "little") + whole[24:36] + state)
        saved, _ = backend.read_state(path, ())
        assert saved.keys == (5, 6, 7)


def test_the_adapters_of_a_file_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state"
    a, b = AdapterInfo(path="/x/a.gguf"), AdapterInfo(path="/x/b.gguf")
    root, state = CacheRoot(((1, 0.5),), "whose", "salt"), b"prefix__state"
    state_file.write(path, SlotState(keys=(5,), root=root, state=state), [a, b])
    read, _ = state_file.read(path, b"prefix__", [b], (), max_tokens=10)
    root = CacheRoot(((0, 0.5),), "whose", "salt")
    assert read == SlotState(keys=(5,), root=root, state=state)
    with pytest.raises(InvalidRequestError, match=r"b\.gguf"):
        state_file.read(path, b"prefix__", [a], (), max_tokens=10)
    with pytest.raises(InvalidRequestError, match="more than the -4 tokens"):
        state_file.read(path, b"prefix__", [b], (), max_tokens=-4)  # five words: one token


async def test_a_cache_with_an_adapter_is_used_only_with_it(tmp_path: Path) -> None:
    lora = str(make_lora(tmp_path / "a.gguf", seed=1))
    config = Config(
        ctx_size=512, threads=1, lora=(lora,), slot_save_path=str(tmp_path), cache_ram=0
    )
    async with Server(config) as server:
        with_it = await server.complete(PROMPT, max_tokens=4, temperature=0.0, id_slot=0)
        await server.save_slot(0, "with")
        await server.erase_slot(0)
        server.adapters.scales.set({})
        await server.restore_slot(0, "with")
        without = await server.complete(PROMPT, max_tokens=4, temperature=0.0)
        assert without.finished.timings.cache_n == 0
        again = await server.complete(PROMPT, max_tokens=4, temperature=0.0, lora=((0, 1.0),))
        assert again.finished.timings.cache_n == len(again.prompt) - 1
        assert again.text == with_it.text != without.text


def test_nothing_is_left_of_a_file_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        state_file.write(tmp_path / "old", SlotState(keys=(5,), state=b"x" * 20), ())
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
