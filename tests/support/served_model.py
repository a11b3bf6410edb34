"""Serves a model file from a thread, for tests that are plain functions and share one server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import attrs
import httpx
import trio

from tests.support.http_server import serving
from tests.support.waiting import PATIENCE
from trioserve import llama
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.engine.backend import Vocab

#: Longer than any answer takes, in seconds.
_TIMEOUT = PATIENCE


@attrs.frozen
class ServedModel:
    """A client of the server, and the vocabulary of its model."""

    client: httpx.Client
    vocab: Vocab

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        """Send a request, and return what the answer has."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Send a request for a stream, and return its events."""
        answer = self.client.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n")]
        return [httpx.Response(200, text=line).json() for line in lines if line[:1] == "{"]


def served_model(path: Path, **config: Any) -> AbstractContextManager[ServedModel]:
    """Serve a model file on a free port."""
    config = {"threads": 1, "ctx_size": 2048, "parallel": 2, **config}
    return served(Config(model=str(path), **config))


@contextmanager
def served(config: Config) -> Iterator[ServedModel]:
    """Serve what a configuration says, on a free port."""
    app = create_app(config, load=llama.load)
    service = app.extensions["trioserve"]
    started: SimpleQueue[tuple[str, trio.Event, trio.lowlevel.TrioToken]] = SimpleQueue()
    failures: list[BaseException] = []

    async def main() -> None:
        stop = trio.Event()
        async with serving(app) as url:
            await service.wait_loaded()
            started.put((url, stop, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            failures.append(error)
            started.put(("", trio.Event(), None))  # type: ignore[arg-type]

    thread = threading.Thread(target=run, name="served-model", daemon=True)
    thread.start()
    url, stop, token = started.get(timeout=_TIMEOUT)
    if not failures:
        with httpx.Client(base_url=url, timeout=_TIMEOUT) as client:
            yield ServedModel(client, service.server.model.vocab)
        token.run_sync_soon(stop.set)
        thread.join(_TIMEOUT)
    if failures:
        raise failures[0]
    assert not thread.is_alive()
