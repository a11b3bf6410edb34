"""``trioserve launch``: starts a coding agent that uses a local model."""

from __future__ import annotations

import math
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import attrs
import msgspec
import trio

from trioserve.cli.address import Address, take_value
from trioserve.cli.agents import AGENTS, NO_KEY, Agent, Endpoint
from trioserve.cli.commands import hush
from trioserve.cli.progress import ProgressReport
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import (
    ConfigError,
    ModelLoadError,
    TrioServeError,
    first_error,
)
from trioserve.models import BUNDLED
from trioserve.models.catalog import ModelEntry, Source
from trioserve.router.child import Child, HealthCheck, Report
from trioserve.router.client import ServerClient, connected_to
from trioserve.router.launch import Spawner

#: The names of the bundled model, alone and beside others.
_BUNDLED = (BUNDLED.name, "bundled")

#: Seconds for a server that was started here to end.
_GRACE = 10.0


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: the agent is unknown or not installed, a flag or a variable is invalid, or the
            server has several models and none is named.
        TrioServeError: the model cannot be loaded, or the server at the URL does not answer.
    """
    words, arguments = _split(argv)
    agent = _agent_named(words.pop(0) if words and not words[0].startswith("-") else None)
    url, flags = take_value("--url", words)
    parsed = parse(flags, environ)
    hush(parsed.config)
    for note in parsed.notes:
        print(f"trioserve: {note}", file=sys.stderr)
    program = shutil.which(agent.program, path=environ.get("PATH"))
    if program is None:
        raise ConfigError(f"{agent.title} is not installed; install it with: {agent.install}")
    server = AgentServer(url, parsed.config, flags, environ)
    launch = partial(_launch, agent, [program, *arguments], server, environ)
    try:
        return trio.run(launch)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at ``--``: ours, and those of the agent."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _agent_named(name: str | None) -> Agent:
    """Find an agent. Raises ConfigError."""
    if name is None:
        raise ConfigError(f"launch needs the name of an agent: {', '.join(AGENTS)}")
    if name not in AGENTS:
        hint = did_you_mean(name, AGENTS) or f"; the agents are {', '.join(AGENTS)}"
        raise ConfigError(f"launch does not know the agent {name!r}{hint}")
    return AGENTS[name]


async def _launch(
    agent: Agent, command: Sequence[str], server: AgentServer, environ: Mapping[str, str]
) -> int:
    """Run an agent with a server, and return its exit code."""
    with tempfile.TemporaryDirectory(prefix="trioserve-launch-") as name:
        async with server.endpoint() as endpoint:
            folder = Path(name)
            settings = agent.settings(endpoint, folder)
            for file, text in settings.files.items():
                (folder / file).write_text(text, encoding="utf-8")
            _introduce(agent, endpoint)
            kept = {key: text for key, text in environ.items() if key not in agent.cleared}
            program, *arguments = command
            return await _attend(
                [program, *settings.arguments, *arguments], kept | dict(settings.environ)
            )


def _introduce(agent: Agent, endpoint: Endpoint) -> None:
    print(
        f"trioserve: {agent.title} uses {endpoint.model} at {endpoint.url}, with a context of "
        f"{endpoint.context} tokens",
        file=sys.stderr,
    )
    if endpoint.context < 2 * agent.first_prompt:
        print(
            f"trioserve: this context is too small: the first request of {agent.title} has about "
            f"{agent.first_prompt} tokens. See --ctx-size, and take a model with a longer context.",
            file=sys.stderr,
        )


@contextmanager
def _leaving(*numbers: signal.Signals) -> Iterator[None]:
    """Leave signals to the programs that the block starts.

    The handlers do nothing: a signal that is ignored would be ignored in the programs, too, and a
    receiver would raise again what it got when the program had just ended.
    """
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _attend(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program in the foreground; returns its exit code. When cancelled, it is killed.

    A terminal sends Ctrl-C and Ctrl-\\ to the program as well as to this process, which leaves
    them to the program. Other signals are passed on.

    Raises:
        ConfigError: it cannot be started.
    """
    with (
        _leaving(signal.SIGINT, signal.SIGQUIT),
        trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals,
    ):
        try:
            process = await trio.lowlevel.open_process(command, env=environ)
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from None

        async def pass_on() -> None:
            async for number in signals:
                process.send_signal(number)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pass_on)
                code = await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
    return code if code >= 0 else 128 - code


# -- the server


class _Status(msgspec.Struct):
    value: str = "loaded"


class _Model(msgspec.Struct):
    """A model in the list of a server. A server of one model gives it no status."""

    id: str
    aliases: list[str] = []
    status: _Status = msgspec.field(default_factory=_Status)


class _Models(msgspec.Struct):
    data: list[_Model]


class _Modalities(msgspec.Struct):
    vision: bool = False


class _Defaults(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    default_generation_settings: _Defaults
    modalities: _Modalities = msgspec.field(default_factory=_Modalities)


@attrs.frozen
class AgentServer:
    """The server that an agent is to use: one that runs, or else one that is started."""

    url: str | None
    config: Config
    flags: Sequence[str]
    environ: Mapping[str, str]

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:
        """Give the model for the length of a block, at whose end a server of this command ends.

        Raises:
            TrioServeError: there is no such model, or it cannot be loaded.
        """
        running = await self._running()
        if running is not None:
            yield await self._load(*running)
            return
        async with self._start() as address:
            yield await self._load(address, _only(await self._models(address)))

    async def _running(self) -> tuple[Address, str] | None:
        """Look for a server that has the model; None if one is to be started.

        Raises:
            ConfigError: the server at the URL does not have the model, or none is named.
            TrioServeError: it does not answer as expected.
        """
        address = Address.of(self.url, self.config)
        if address.socket_path is not None:
            if self.url is not None:
                raise ConfigError("agents need an address with a port; --url names a Unix socket")
            return None
        try:
            models = await self._models(address)
        except TrioServeError:
            if self.url is not None:
                raise
            return None  # no server, or one of another kind
        name = self.config.model_named
        found = _only(models) if name is None else _named(models, name)
        if found is None and self.url is not None:
            have = ", ".join(one.id for one in models)
            raise ConfigError(f"{address} has no model {name}; it has {have}")
        return None if found is None else (address, found)

    async def _models(self, address: Address) -> Sequence[_Model]:
        async with self._client(address) as client:
            return (await client.ask("/v1/models", form=_Models)).data

    async def _load(self, address: Address, model: str) -> Endpoint:
        """Ask for the properties of a model, which a router loads for that."""
        async with self._client(address) as client:
            with ProgressReport(sys.stderr, n_log_lines=0) as report:
                report.tell(0.0, f"Loading {model}", "loading")
                props = await client.ask(f"/props?model={quote(model)}", form=_Props)
        return Endpoint(
            url=address.url,
            model=model,
            context=props.default_generation_settings.n_ctx,
            sees_images=props.modalities.vision,
            api_key=next(iter(self.config.api_keys), NO_KEY),
        )

    def _client(self, address: Address) -> AbstractAsyncContextManager[ServerClient]:
        return connected_to(address.url, api_key=next(iter(self.config.api_keys), None))

    @asynccontextmanager
    async def _start(self) -> AsyncIterator[Address]:
        """Run a server on a free port of this machine for the length of a block.

        Raises:
            ModelLoadError: it does not start.
        """
        address = attrs.evolve(Address.of(None, self.config), host="127.0.0.1", port=_free_port())
        argv = [*self.flags, "--host", address.host, "--port", str(address.port)]
        name = self.config.model_named or "bundled"
        entry = ModelEntry(name=name, source=Source.PRESET, args=tuple(self.flags), path=None)
        watch = HealthCheck(interval=math.inf)
        child = Child(name, 0, entry=entry, socket_path=Path(), watch=watch)
        decided = trio.Event()
        with ProgressReport(sys.stderr, n_log_lines=0) as progress:

            def told(report: Report) -> None:
                if report["state"] in ("ready", "failed", "ended"):
                    decided.set()
                elif (share := report.get("progress")) is not None and not decided.is_set():
                    line = f"{report['state'].capitalize()} {child.name}: {share:4.0%}"
                    progress.tell(share, line, report["state"])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(child.run, Spawner(self.environ), argv, told)
                await decided.wait()
                progress.end()
                if child.message is not None or child.ended.is_set():
                    raise ModelLoadError(child.last_words())
                try:
                    yield address
                finally:
                    await _end(child)


async def _end(child: Child) -> None:
    """End a server and wait for its end, in a shield. Print a line if it had ended before."""
    if child.ended.is_set():
        print(f"trioserve: {child.last_words()}", file=sys.stderr)
    child.stop(_GRACE)
    with trio.CancelScope(shield=True):
        await child.ended.wait()


def _only(models: Sequence[_Model]) -> str:
    """The model of a server, if it has only one beside the bundled one, or has loaded only one.

    Raises:
        ConfigError: there are several.
    """
    loaded = [one for one in models if one.status.value in ("loaded", "sleeping")]
    others = [one for one in models if one.id not in _BUNDLED]
    for some in (models, loaded, others):
        if len(some) == 1:
            return some[0].id
    names = ", ".join(one.id for one in models)
    raise ConfigError(f"name the model with --model; the server has {names}")


def _named(models: Sequence[_Model], name: str) -> str | None:
    """The model of that name, or of that file."""
    path = Path(name)
    names = {name, path.name, path.stem} if path.suffix == ".gguf" else {name}
    for one in models:
        if not names.isdisjoint({one.id, *one.aliases}):
            return one.id
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
