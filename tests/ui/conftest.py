"""One browser for all tests of the page, and one server whose model follows a script."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browsing import CHROMIUM, Visitor, chromium
from tests.support.cable import Cable, cable_to
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving_script, slots_in_use
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from tests.support.waiting import until
from trioserve.api.service import Service


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None and "NEEDS_CHROMIUM" not in os.environ:
        pytest.skip("no Chromium on this machine: install `chromium`, as .ci/run does")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def loop() -> Iterator[TrioThread]:
    with TrioThread() as thread:
        yield thread


@pytest.fixture(scope="package")
def _script() -> PacedScript:
    return PacedScript()


@pytest.fixture(scope="package")
def server(loop: TrioThread, _script: PacedScript) -> Iterator[tuple[str, Service]]:
    """The base URL and the service of a server that all tests share."""
    with loop.open(serving_script(_script.backend())) as server:
        yield server


@pytest.fixture
def script(
    _script: PacedScript, loop: TrioThread, server: tuple[str, Service]
) -> Iterator[PacedScript]:
    """The answer of its model."""
    yield _script
    _script.go_on()
    _script.reset()
    loop.run(_end_answers, server[1])


async def _end_answers(service: Service) -> None:
    """Stop the answers that outlive their page, so that they come to no hold of the next test."""
    for session in list(service.streams):
        service.streams.stop(session, "The test is over.")

    async def is_idle() -> bool:
        return await slots_in_use(service) == 0

    await until(is_idle)


@pytest.fixture
def cable(loop: TrioThread, server: tuple[str, Service]) -> Iterator[Cable]:
    """A network between a page and the server."""
    with loop.open(cable_to(server[0])) as cable:
        yield cable


@pytest.fixture
def visitor(browser: Browser, script: PacedScript) -> Iterator[Visitor]:
    """Opens pages. Fails a test in which something happened that must not happen in a page."""
    visitor = Visitor(browser)
    yield visitor
    script.go_on()  # nothing may hold up the server when its pages are closed
    visitor.close()
    assert visitor.unexpected() == []


@pytest.fixture
def chat(visitor: Visitor, server: tuple[str, Service]) -> ChatPage:
    """A page of the server, as on a first visit."""
    return ChatPage(visitor.visit(server[0]))
