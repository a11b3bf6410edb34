"""The first words of a container."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import memory_stream_one_way_pair, wait_all_tasks_blocked

from trioserve.errors import ToolRuntimeError
from trioserve.tools.process import CommandLimits, Process
from trioserve.tools.runtime import OwnContainer


class Client:
    """A program that writes by hand."""

    def __init__(self) -> None:
        self.stdin, _ = memory_stream_one_way_pair()
        self.says, stdout = memory_stream_one_way_pair()
        self.complains, stderr = memory_stream_one_way_pair()
        pipes = SimpleNamespace(stdin=self.stdin, stdout=stdout, stderr=stderr)
        self.process = cast(Process, pipes)


def container() -> OwnContainer:
    return OwnContainer("docker", "alpine", CommandLimits())


async def test_its_first_word_may_come_in_two_pieces() -> None:
    client = Client()
    await client.complains.aclose()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(container()._until_ready, client.process)
        await client.says.send_all(b"welcome\nre")
        await wait_all_tasks_blocked()
        await client.says.send_all(b"ady\n")


async def test_what_it_complains_of_is_the_reason() -> None:
    client = Client()
    await client.says.aclose()
    await client.complains.send_all(b"no such image\n")
    await client.complains.aclose()
    with pytest.raises(ToolRuntimeError, match="cannot start alpine: no such image"):
        await container()._until_ready(client.process)
