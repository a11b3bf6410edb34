import asyncio
import socket

import pytest

from trioserve.errors import ModelProcessError
from trioserve.ray.lifelines import Anchor, Lifelines
from trioserve.ray.replica import exchange
from trioserve.router.forward import Outgoing


class Ingress:
    """Listens as an ingress does, until it dies."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []

    async def begin(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._hold, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def _hold(self, reader, writer) -> None:
        self.writers.append(writer)

    async def die(self) -> None:
        self._server.close()
        for writer in self.writers:
            writer.close()
            await writer.wait_closed()


def test_what_is_held_for_an_ingress_breaks_when_it_ends(tmp_path) -> None:
    async def answer_nothing(reader, writer) -> None:
        await reader.read()  # until the other side is gone
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(answer_nothing, tmp_path / "x.sock")
        first, second = Ingress(), Ingress()
        addresses = [await first.begin(), await second.begin()]
        lifelines = Lifelines()

        async def ask(address: tuple[str, int]) -> None:
            held = lifelines.of(address)
            async with exchange(tmp_path / "x.sock", Outgoing("GET", "/", ()), held=held):
                raise AssertionError

        ended, other = (asyncio.create_task(ask(address)) for address in addresses)
        while not (first.writers and second.writers):
            await asyncio.sleep(0.001)
        await first.die()
        with pytest.raises(ModelProcessError):
            await ended
        assert not other.done()
        await second.die()
        with pytest.raises(ModelProcessError):
            await other
        lifelines.close()
        server.close()
        await asyncio.sleep(0.05)  # for the connections to close

    asyncio.run(run())


def test_an_ingress_holds_the_connections_of_replicas() -> None:
    async def run() -> None:
        anchor = Anchor("127.0.0.1")
        await anchor.begin()
        lifelines = Lifelines()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            lifelines.of(anchor.address).add(ours)
            reader, writer = await asyncio.open_connection(*anchor.address)
            writer.write(b"whatever")  # it listens to nobody
            assert await reader.read() == b""
            writer.close()
            ours.send(b"still there")
            assert theirs.recv(100) == b"still there"
        lifelines.close()
        anchor.end()

    asyncio.run(run())


def test_where_the_ingress_cannot_be_reached_requests_go_on(caplog) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        address = taken.getsockname()

        async def run() -> None:
            lifelines = Lifelines()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                for _ in range(2):
                    lifelines.of(address).add(ours)
                    while lifelines._held:
                        await asyncio.sleep(0.001)
                ours.send(b"still there")
                assert theirs.recv(100) == b"still there"

        asyncio.run(run())
    assert caplog.text.count("would not be noticed") == 1


def test_an_ingress_that_may_not_listen_does_without(caplog) -> None:
    async def run() -> None:
        anchor = Anchor("203.0.113.1")  # which is no address of this machine
        await anchor.begin()
        assert anchor.address is None
        anchor.end()
        assert Lifelines().of(anchor.address) == set()

    asyncio.run(run())
    assert "will not learn" in caplog.text
