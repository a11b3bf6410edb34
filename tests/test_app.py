"""The app: routes while the model loads, and the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import httpx
import pytest
import trio
from hypercorn.utils import LifespanFailureError
from quart import request
from structlog.testing import capture_logs

from tests.support.http_server import serving
from tests.support.waiting import patiently
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.engine.backend import Backend
from trioserve.errors import ModelLoadError, ModelLoadingError, ServerClosingError
from trioserve.testing import ScriptedBackend, scripted


class SlowLoader:
    """Loads a scripted backend when told to, or gives up as llama.cpp does."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_finish = threading.Event()
        self.gave_up = False
        self.backend = ScriptedBackend()

    def __call__(
        self, config: Config, *, progress: Callable[[float], bool] | None = None
    ) -> Backend:
        self.has_begun.set()
        assert progress is not None
        try:
            while not self.may_finish.wait(0.005):
                progress(0.5)
        except trio.Cancelled:
            self.gave_up = True
            raise
        return self.backend


@pytest.mark.system
def test_importing_loads_no_model() -> None:
    code = (
        "import threading, trioserve.app;"
        "assert threading.active_count() == 1;"
        "assert trioserve.app.app.extensions['trioserve'].failure is None"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "LLAMA_ARG_PORT": "not read"},
        timeout=60,
    )


async def test_requests_are_answered_while_the_model_loads() -> None:
    loader = SlowLoader()
    app = create_app(Config(), load=loader)
    service = app.extensions["trioserve"]
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for path in ("/health", "/v1/models"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert answer.json()["error"] == {
                "code": 503,
                "message": "Loading model",
                "type": "unavailable_error",
                "param": None,
            }
        assert (await client.get("/health/live")).status_code == 200
        with pytest.raises(ModelLoadingError):
            _ = service.server
        loader.may_finish.set()
        await service.wait_loaded()
        assert (await client.get("/health")).status_code == 200
    assert loader.backend.closed
    with pytest.raises(ServerClosingError):
        _ = service.server


async def test_shutdown_while_the_model_loads() -> None:
    loader = SlowLoader()
    with patiently():
        async with (
            serving(create_app(Config(), load=loader)) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            assert (await client.get("/health")).status_code == 503
            await trio.to_thread.run_sync(loader.has_begun.wait)
    assert loader.gave_up


async def test_drain_while_the_model_loads() -> None:
    loader = SlowLoader()
    app = create_app(Config(), load=loader)
    with patiently():
        async with serving(app):
            await trio.to_thread.run_sync(loader.has_begun.wait)
            await app.extensions["trioserve"].drain()
    assert loader.gave_up


async def test_a_model_that_cannot_be_loaded_ends_serving() -> None:
    def load(config: Config, *, progress: object = None) -> Backend:
        raise ModelLoadError("The file is not a model.")

    app = create_app(Config(), load=load)
    with capture_logs() as logs, pytest.raises(BaseExceptionGroup) as caught:
        async with serving(app):
            await trio.sleep_forever()
    assert caught.group_contains(LifespanFailureError, match="The file is not a model")
    assert [line["event"] for line in logs if line["log_level"] == "error"] == [
        "The file is not a model."
    ]
    failure = app.extensions["trioserve"].failure
    assert isinstance(failure, ModelLoadError)
    with pytest.raises(ModelLoadError):
        _ = app.extensions["trioserve"].server


async def test_the_environment_is_read_when_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(load=scripted(ScriptedBackend()))
    configured: list[Config] = []
    monkeypatch.setattr("trioserve.config.logs.configure", configured.append)
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "3")
    monkeypatch.setenv("LLAMA_API_KEY", "key")
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        headers = {"Authorization": "Bearer key"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as client:
            answer = await client.post("/completion", json={"prompt": "abcdef"})
    assert answer.json()["content"] == "ABC"
    assert configured[0].n_predict == 3


async def test_a_program_may_add_routes_of_quart() -> None:
    app = create_app(Config(api_keys=("key",)), load=scripted(ScriptedBackend()))

    @app.get("/own/<name>")
    async def own(name: str) -> str:
        return f"{name} by {request.method}"

    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/own/a")).status_code == 401
        answer = await client.get("/own/a", headers={"Authorization": "Bearer key"})
        assert (answer.status_code, answer.text) == (200, "a by GET")
        assert "X-Request-Id" in answer.headers


async def test_a_bad_environment_is_told_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "none")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with serving(create_app()):
            pass
    assert caught.group_contains(LifespanFailureError, match="LLAMA_ARG_N_PARALLEL")


async def test_drain_lets_a_stream_finish_and_takes_no_more() -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 60)
    token = trio.lowlevel.current_trio_token()
    gate = trio.Event()

    def on_decode(backend: ScriptedBackend) -> None:
        if backend.n_decodes == 5:
            trio.from_thread.run(gate.wait, trio_token=token)

    backend.on_decode = on_decode
    app = create_app(Config(drain_timeout=10), load=scripted(backend))
    service = app.extensions["trioserve"]
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await service.wait_loaded()
        body = {"prompt": "a", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(service.drain)
                await trio.testing.wait_all_tasks_blocked(0.01)
                refused = await client.post("/completion", json={"prompt": "a"})
                assert refused.status_code == 503
                assert (await client.get("/health")).status_code == 503
                gate.set()
                rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"


@pytest.mark.system
def test_a_server_of_one_model_imports_no_router() -> None:
    code = "import sys, trioserve.app; print([n for n in sys.modules if 'router' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
