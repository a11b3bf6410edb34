"""A model that is divided between two RPC servers: its text, and what happens when one fails."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from tests.rpc.conftest import RpcServer
from tests.support.command import Running, serving
from tests.support.http_server import connected, post
from tests.support.measured import Report
from tests.support.rpc_peer import answers, dead_end, listening, says
from tests.support.waiting import patiently
from trioserve.llama.rpc import peers

pytestmark = pytest.mark.system

Servers = tuple[RpcServer, RpcServer]

#: Seconds that a step may take in these tests. The cores are shared with whatever else runs.
WATCHDOG = 5.0
#: What comes on top of that until the process is killed: how often the engine is asked, the
#: router's questions, two of which are answered with 503, and time for a busy machine.
ON_TOP = WATCHDOG / 8 + 2 * 5.0 + 5.0

#: What the model has something to say to, so that its best token is clearly the best: how many
#: tokens are computed together changes the last digits of its logits.
PROMPTS = ("Once upon a time", "Tom was a happy boy", "Once there was a girl named Lily", "The cat")


@asynccontextmanager
async def dividing(*addresses: str, flags: tuple[str, ...] = ()) -> AsyncIterator[Running]:
    """Serve the bundled model on these machines."""
    argv = ("--rpc", ",".join(addresses), "-c", "4096", "--watchdog-timeout", str(WATCHDOG))
    async with serving(*argv, *flags, timeout=240) as running:
        yield running


@pytest.fixture
async def divided(rpc_servers: Servers) -> AsyncIterator[Running]:
    async with dividing(*(one.address for one in rpc_servers)) as running:
        yield running


def client_of(running: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=running.url, timeout=120)


async def complete(client: httpx.AsyncClient, prompt: str, n: int = 32) -> httpx.Response:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True}
    return await client.post("/completion", json=body)


async def texts(client: httpx.AsyncClient, *, together: bool) -> list[str]:
    """Continue all prompts, one after the other or at the same time."""
    found = {}

    async def one(prompt: str) -> None:
        response = await complete(client, prompt)
        assert response.status_code == 200, response.text
        found[prompt] = response.json()["content"]

    limit = trio.CapacityLimiter(len(PROMPTS) if together else 1)

    async def limited(prompt: str) -> None:
        async with limit:
            await one(prompt)

    async with trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            nursery.start_soon(limited, prompt)
    return [found[prompt] for prompt in PROMPTS]


@asynccontextmanager
async def stream(running: Running) -> AsyncIterator[Callable[[], Any]]:
    """An endless stream; gives a function that returns its next event."""
    body = {"messages": [{"role": "user", "content": "Tell me a story"}], "stream": True}
    body |= {"max_tokens": 3000, "ignore_eos": True}
    unread = b""

    async def event() -> Any:
        nonlocal unread
        while True:
            line, end, rest = unread.partition(b"\n")
            if end:
                unread = rest
                if line.startswith(b"data: "):
                    return json.loads(line.removeprefix(b"data: "))
            else:
                data = await connection.receive_some()
                assert data, "the stream ended without an error"
                unread += data

    async with connected(running.url) as connection:
        await connection.send_all(post("/v1/chat/completions", json.dumps(body).encode()))
        yield event


async def the_error_of(running: Running, fail: Callable[[], None]) -> tuple[Any, float]:
    """Have a machine fail in the middle of a stream; returns the last event, and the seconds."""
    async with stream(running) as event:
        for _ in range(3):
            assert "choices" in await event()
        fail()
        began = time.monotonic()
        while "error" not in (last := await event()):
            pass
        return last["error"], time.monotonic() - began


async def until_served(client: httpx.AsyncClient) -> float:
    """Send requests until one is answered; returns the seconds."""
    began = time.monotonic()
    with patiently():
        while (response := await complete(client, "Once", 1)).status_code != 200:
            assert response.status_code == 503, response.text
            await client.post("/models/load", json={"model": "bundled.gguf"})
    return time.monotonic() - began


# -- the text


async def test_the_text_is_the_same_as_on_one_machine(rpc_servers: Servers) -> None:
    async with serving("-c", "4096") as running, client_of(running) as client:
        expected = await texts(client, together=False)
    async with (
        dividing(*(one.address for one in rpc_servers)) as running,
        client_of(running) as client,
    ):
        assert await texts(client, together=False) == expected
        assert await texts(client, together=True) == expected
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["id"] == "bundled.gguf"
    assert len(set(expected)) == len(PROMPTS)


async def test_both_machines_have_layers(rpc_servers: Servers) -> None:
    addresses = [one.address for one in rpc_servers]
    async with dividing(*addresses, flags=("--log-level", "debug")) as running:
        async with client_of(running) as client:
            assert (await complete(client, "Once", 1)).status_code == 200
        said = [line["event"] for line in running.lines_so_far()]
    for address in addresses:
        assert any(f"[{address}] model buffer size" in line for line in said)
        assert any(f"[{address}] KV buffer size" in line for line in said)


async def test_one_device_can_have_all_of_it(rpc_servers: Servers) -> None:
    addresses = [one.address for one in rpc_servers]
    flags = ("--log-level", "debug", "--device", "RPC1")
    async with dividing(*addresses, flags=flags) as running:
        async with client_of(running) as client:
            assert (await complete(client, "Once", 1)).status_code == 200
        said = [line["event"] for line in running.lines_so_far()]
    sizes = [line for line in said if "model buffer size" in line and "RPC" in line]
    assert len(sizes) == 1
    assert addresses[1] in sizes[0]


async def test_a_client_that_leaves_frees_its_slot(divided: Running) -> None:
    async with client_of(divided) as client:
        async with stream(divided) as event:
            await event()
        with patiently():
            while any(one["is_processing"] for one in (await client.get("/slots")).json()):
                pass
        assert (await complete(client, "Once", 4)).status_code == 200


async def test_a_model_that_sleeps_comes_back(rpc_servers: Servers) -> None:
    addresses = [one.address for one in rpc_servers]
    async with dividing(*addresses) as running, client_of(running) as client:
        first = await complete(client, "Once upon a time")
        body = {"prompt": "Once", "n_predict": 1, "keep_alive": 0}
        assert (await client.post("/completion", json=body)).status_code == 200
        with patiently():
            while (await status_of(client))["value"] != "sleeping":
                pass
        # The machines are free for others meanwhile.
        for address in addresses:
            await trio.to_thread.run_sync(peers.greet, address, address)
        again = await complete(client, "Once upon a time")
        assert again.json()["content"] == first.json()["content"]


async def status_of(client: httpx.AsyncClient) -> Any:
    (model,) = (await client.get("/models")).json()["data"]
    return model["status"]


# -- machines that fail


@pytest.fixture
def restored(rpc_servers: Servers) -> Iterator[Servers]:
    yield rpc_servers
    for one in rpc_servers:
        one.send(signal.SIGCONT)
        if one.process is not None and one.process.poll() is not None:
            one.start()


async def test_a_machine_that_dies_ends_its_streams_and_comes_back(
    restored: Servers, report: Report
) -> None:
    first, second = restored
    async with (
        dividing(first.address, second.address) as running,
        client_of(running) as client,
    ):
        error, seconds = await the_error_of(running, second.end)
        assert error["code"] == "model_process_ended"
        assert seconds < 5
        response = await complete(client, "Once", 1)
        assert response.status_code == 503
        assert f"{second.address} cannot be reached: Connection refused" in response.text
        assert (await status_of(client))["failed"] is True
        second.start()
        again = await until_served(client)
    report(f"an RPC server is killed: error after {seconds * 1e3:.0f} ms")
    report(f"it is there again: a request is answered after {again:.1f} s")


async def test_a_machine_that_is_started_again_at_once_costs_one_load(
    restored: Servers, report: Report
) -> None:
    first, second = restored
    async with (
        dividing(first.address, second.address) as running,
        client_of(running) as client,
    ):

        def restart() -> None:
            second.end()
            second.start()

        await the_error_of(running, restart)
        began = time.monotonic()
        response = await complete(client, "Once", 1)
        assert response.status_code == 200, response.text
    report(f"an RPC server is started again at once: answered {time.monotonic() - began:.1f} s "
           f"after the error, without a 503")  # fmt: skip


async def test_a_machine_that_hangs_is_given_up(restored: Servers, report: Report) -> None:
    first, second = restored
    async with (
        dividing(first.address, second.address) as running,
        client_of(running) as client,
    ):
        error, seconds = await the_error_of(running, lambda: second.send(signal.SIGSTOP))
        assert error["code"] == "model_process_ended"
        assert WATCHDOG <= seconds < WATCHDOG + ON_TOP
        response = await complete(client, "Once", 1)
        assert response.status_code == 503
        assert f"{second.address} accepts connections but does not answer" in response.text
        second.send(signal.SIGCONT)
        again = await until_served(client)
    report(f"an RPC server hangs: error after {seconds:.1f} s, with --watchdog-timeout "
           f"{WATCHDOG:g}")  # fmt: skip
    report(f"it goes on: a request is answered after {again:.1f} s")


async def test_a_second_client_is_told(divided: Running, rpc_servers: Servers) -> None:
    address = rpc_servers[0].address
    async with client_of(divided) as client:
        assert (await complete(client, "Once", 1)).status_code == 200
        async with dividing(address) as other, client_of(other) as second:
            response = await complete(second, "Once", 1)
            assert response.status_code == 503
            assert "it may have another client, for it serves one at a time" in response.text
        assert (await complete(client, "Once", 1)).status_code == 200


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "is no RPC server of this version"),
        (answers((6, 0, 0)), "speaks version 6.0.0 of the protocol"),
        (None, "cannot be reached: Connection refused"),
    ],
)
@pytest.mark.usefixtures("rpc_servers")
async def test_what_is_no_server_is_told_to_clients(handle: Any, message: str) -> None:
    with listening(handle or answers()) as there:
        address = there if handle is not None else dead_end()
        async with dividing(address) as running, client_of(running) as client:
            response = await complete(client, "Once", 1)
            assert response.status_code == 503
            assert message in response.json()["error"]["message"]
