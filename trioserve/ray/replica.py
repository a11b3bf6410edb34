"""A replica: an actor of Ray with a child that has the model, and requests on their way to it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from trioserve.children.child import how
from trioserve.children.frames import FrameError, FrameReader
from trioserve.children.launch import COMMAND, environment
from trioserve.children.reports import MAX_REPORT, Failed, Ready, Report, Usage, decode
from trioserve.config import Config
from trioserve.config.parse import argv_of
from trioserve.errors import ModelLoadError, ModelProcessError
from trioserve.models import BUNDLED
from trioserve.models.catalog.presets import environment_of_children
from trioserve.ray.calls import HEAD, LOST, TAKEN, UNSENT, Part
from trioserve.ray.incoming import Sent
from trioserve.ray.lifelines import Address, Lifelines
from trioserve.router import forward
from trioserve.router.forward import ChildAnswer, NotTakenError, Outgoing, SocketIO
from trioserve.router.socket_folder import socket_folder
from trioserve.whole_numbers import whole_number

_log = logging.getLogger("ray.serve")

#: Seconds in which a child has to say something after its start, and to answer whether it lives.
_START_TIMEOUT = 120.0
_ANSWER_TIMEOUT = 10.0


async def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    return await asyncio.get_running_loop().sock_recv(connection, n_bytes)


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


#: Sends a request to a child, as in the router, but on the event loop of asyncio.
exchange = partial(forward.exchange, io=SocketIO(_receive, _send))


class ServerProcess:
    """A server in a separate process, which listens on a Unix socket.

    It exits when this process exits or dies. Its log goes to this process's log.

    Args:
        socket_path: where it listens.
        argv: its flags, but for the socket.
        environ: its environment.
    """

    def __init__(
        self,
        socket_path: Path,
        argv: Sequence[str],
        environ: Mapping[str, str],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.socket_path = socket_path
        self.info: Mapping[str, Any] = {}
        self.ended = asyncio.Event()
        self._argv = (*command, *argv, "--host", str(socket_path))
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._message = ""
        self._told: asyncio.Queue[Report | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, and wait until its model is loaded. If that fails or is cancelled, it ends.

        Raises:
            ModelLoadError: it cannot be started, or it cannot load its model.
        """
        self._frames, theirs = socket.socketpair()
        self._frames.setblocking(False)
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=theirs.fileno(),
                    env=environment(self._environ),
                    start_new_session=True,
                )
            except OSError as error:
                self._frames.close()
                raise ModelLoadError(
                    f"The process of the model cannot be started: {error.strerror}."
                ) from None
        self._tasks = [
            asyncio.create_task(self._read_reports()),
            asyncio.create_task(self._wait()),
        ]
        try:
            await self._until_ready()
        except BaseException:
            await self.stop(0)
            raise

    async def _until_ready(self) -> None:
        timeout: float | None = _START_TIMEOUT
        while True:
            try:
                report = await asyncio.wait_for(self._told.get(), timeout)
            except TimeoutError:
                raise ModelLoadError(
                    f"The process of the model did not start within {timeout:g} seconds."
                ) from None
            if isinstance(report, Ready):
                return
            if report is None or isinstance(report, Failed):
                raise ModelLoadError(self.last_words())
            timeout = None  # a download may take long

    async def _read_reports(self) -> None:
        """Read what it reports until it ends."""
        frames = FrameReader(MAX_REPORT)
        with self._frames, suppress(ConnectionResetError):
            while data := await _receive(self._frames, 2**16):
                try:
                    self._take(map(decode, frames.feed(data)))
                except FrameError as error:
                    self._message = f"Its socket is broken: {error}."
                    self.kill()
                    return

    def _take(self, reports: Iterable[Report]) -> None:
        for report in reports:
            match report:
                case Failed(message):
                    self._message = message
                case Ready(dict(info)):
                    self.info = info
                case Usage():
                    continue  # which comes as long as there are requests
            self._told.put_nowait(report)

    async def _wait(self) -> None:
        assert self._process is not None
        await self._process.wait()
        with suppress(TimeoutError):  # its last report may still be on its way
            await asyncio.wait_for(asyncio.shield(self._tasks[0]), 1.0)
        self.ended.set()
        self._told.put_nowait(None)

    async def problem(self) -> str:
        """Ask whether it lives; returns the error, or nothing if it is healthy."""
        if self.ended.is_set():
            return self.last_words()
        try:
            async with (
                asyncio.timeout(_ANSWER_TIMEOUT),
                exchange(self.socket_path, Outgoing("GET", "/health/live", ())) as answer,
            ):
                status = answer.status
        except TimeoutError:
            return f"The process of the model does not answer within {_ANSWER_TIMEOUT:g} seconds."
        except ModelProcessError as error:
            return error.message
        return "" if status == 200 else f"The model is stuck: its server answers {status}."

    def last_words(self) -> str:
        """The reason why the process ended, for the log."""
        code = None if self._process is None else self._process.returncode
        if self._message:
            return self._message
        ended = "did not start" if code is None else how(code)
        return f"The process of the model {ended}; what it said is in the log of its replica."

    def kill(self) -> None:
        """Kill the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self, timeout: float) -> None:
        """Let it finish its requests, within a time in seconds, and end. Then it is killed."""
        process = self._process
        if process is None:
            return
        if timeout > 0 and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), timeout)
        self.kill()
        await asyncio.shield(self.ended.wait())


#: Bodies up to this length (bytes) come with the head.
_SHORT = 2**20

#: Seconds between the end of the child and that of the replica: what the child has sent last, and
#: the errors of its requests, leave in between.
_FAREWELL = 0.5

#: Seconds that a query of the child's cache may take.
_LOOK_TIMEOUT = 1.0

#: Times in a row that a child may fail to answer.
_MAX_MISSED = 2


class Replica:
    """The deployment of one model. It ends with its child, and the child ends with it.

    Args:
        config: of its server.

    Raises:
        ModelLoadError: the model cannot be loaded.
    """

    _is_closed = True  # until there is a child

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        if config.keys_file is not None and not config.api_keys:
            config = attrs.evolve(config, api_keys=(secrets.token_urlsafe(),))  # ours
        self._config = config
        self._closing = ExitStack()
        self._n_running = 0
        self._n_missed = 0
        self._lifelines = Lifelines()
        folder = self._closing.enter_context(socket_folder())
        self._child = ServerProcess(
            folder / "model.sock", child_argv(config), environment_of_children(os.environ, config)
        )
        try:
            await self._child.start()
        except BaseException:
            self._closing.close()
            raise
        self._is_closed = False
        self._watching = asyncio.create_task(self._end_with_child())

    async def forward(
        self, sent: Sent, hint: object = None, ingress: Address | None = None
    ) -> AsyncGenerator[Part, None]:
        """Have the child answer a request, and pass that on as it comes.

        At first comes that it was taken; then the head with the body's beginning, and the rest of
        it. When the child ends, the last part is `LOST`. Leaving the generator closes the
        connection to the child, which cancels the request.

        Args:
            sent: the request.
            hint: for the router of requests, which chose this replica by it.
            ingress: whose end is the end of the request.
        """
        yield (TAKEN,)
        self._n_running += 1
        try:
            held = self._lifelines.of(ingress)
            async with exchange(self._child.socket_path, Outgoing(*sent), held=held) as answer:
                body = await answer.receive_all() if _is_short(answer) else answer.take()
                yield (HEAD, answer.status, answer.headers, body)
                while part := await answer.receive():
                    yield part
        except NotTakenError:
            yield (UNSENT,)
        except ModelProcessError:
            yield (LOST,)
        finally:
            self._n_running -= 1

    # -- called by Serve

    async def check_health(self) -> None:
        """Raise if the child cannot answer. One that does not for too long is killed.

        Raises:
            ModelProcessError: what is wrong with it.
        """
        problem = await self._child.problem()
        self._n_missed = self._n_missed + 1 if problem else 0
        if self._n_missed >= _MAX_MISSED:
            _log.error("the server of the model is killed: %s", problem)
            self._child.kill()
        if problem:
            raise ModelProcessError(problem)

    async def record_routing_stats(self) -> dict[str, float]:
        """Tell the router of requests how full this replica is."""
        slots = self._config.parallel
        running = min(self._n_running, slots)
        stats: dict[str, float] = {
            "slots": slots,
            "running": running,
            "waiting": self._n_running - running,
        }
        with suppress(ModelProcessError, TimeoutError):  # as in a long step
            stats["kv"] = await self._kv_in_use()
        return stats

    async def _kv_in_use(self) -> float:
        """Ask the child for the share of the KV cache that running requests use."""
        request = Outgoing("GET", "/v1/metrics", self._key())
        async with (
            asyncio.timeout(_LOOK_TIMEOUT),
            exchange(self._child.socket_path, request) as answer,
        ):
            cells = json.loads(await answer.receive_all())["kv_cache"]
        return float(cells["running"] / cells["cells"]) if cells["cells"] else 0.0

    def _key(self) -> list[tuple[bytes, bytes]]:
        """What opens the child's routes to us."""
        keys = self._config.api_keys
        return [(b"x-api-key", keys[0].encode())] if keys else []

    def __del__(self) -> Awaitable[None] | None:
        """Have the child finish and end, in what is returned, which Serve awaits.

        Serve calls this once no requests are left, or they have taken too long. When Python itself
        calls it, there is nothing left to do.
        """
        return None if self._is_closed else self.close()

    async def close(self) -> None:
        """Have the child finish and end."""
        self._is_closed = True
        self._watching.cancel()
        self._lifelines.close()
        await self._child.stop(self._config.drain_timeout)
        self._closing.close()

    async def _end_with_child(self) -> None:
        """End this process when the child has, so that Serve starts another replica."""
        await self._child.ended.wait()
        self._is_closed = True
        _log.error("the replica ends: %s", self._child.last_words())
        await asyncio.sleep(_FAREWELL)
        self._closing.close()
        os._exit(1)


def child_argv(config: Config) -> tuple[str, ...]:
    """The flags of a child. What others must not see goes into its environment instead.

    Its replica reads its metrics, even where clients may not.
    """
    hidden: dict[str, Any] = {
        "api_keys": (),
        "keys_file": None,
        "api_key_weights": (),
        "api_key_priority": (),
    }
    hidden |= {"hf_token": None, "mcp_servers_json": None}
    config = attrs.evolve(config, **hidden, metrics_endpoint=True)
    words = argv_of(config)
    return words if config.model_named is not None else (*words, "--model", str(BUNDLED))


def _is_short(answer: ChildAnswer) -> bool:
    """Whether an answer is to be passed on in one piece."""
    return whole_number(answer.header(b"content-length"), least=1, most=_SHORT) is not None
