"""``trioserve launch``: starts a coding agent with a local model, or tells a program of one."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import attrs
import msgspec
import trio

from trioserve.cli.address import Address
from trioserve.cli.agents import (
    AGENTS,
    CONFIGURED,
    NO_KEY,
    Agent,
    Configured,
    Endpoint,
    Settings as AgentSettings,
    filled,
)
from trioserve.cli.configured import Settings, difference, shown_key
from trioserve.cli.local_server import (
    client_of,
    models_at,
    named,
    names_of,
    only,
    props_of,
    started,
)
from trioserve.cli.options import Arguments
from trioserve.cli.output import BLUE, note
from trioserve.cli.progress import ProgressReport
from trioserve.cli.signals import run_foreground
from trioserve.config import Config
from trioserve.config.flags import BY_FIELD
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, TrioServeError, UnavailableError

#: Seconds in which an agent tells of itself.
_ANSWER_SECONDS = 10.0


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    name, environ = given.words[0], given.environ
    if name in CONFIGURED and given["undo"]:
        return _undo(Settings.of(name, environ), is_dry=given["dry_run"])
    if given["undo"]:
        raise ConfigError(f"launch changes no file of {AGENTS[name].title}, so nothing is to undo")
    server = AgentServer(given["url"], given.parsed().config, given.flags, environ)
    if name in CONFIGURED:
        settings = Settings.of(name, environ)
        return run_foreground(partial(_configure, settings, server, is_dry=given["dry_run"]))
    agent = AGENTS[name]
    program = shutil.which(agent.program, path=environ.get("PATH"))
    if program is None:
        raise ConfigError(f"{agent.title} is not installed; install it with: {agent.install}")
    command = [program, *given.after]
    return run_foreground(partial(_launch, agent, command, server, is_dry=given["dry_run"]))


async def _configure(settings: Settings, server: AgentServer, *, is_dry: bool) -> int:
    async with server.endpoint(must_run=True) as endpoint:
        _check_name(settings.program, endpoint.model)
    before, after, record = settings.planned(endpoint)
    print(difference(settings.path, before, after), end="")
    if is_dry:
        return 0
    settings.apply(after, record)
    fields = {"model": endpoint.model, "key": shown_key(endpoint)}
    then = filled(settings.program.then, fields)
    note(f"{settings.program.title} has {endpoint.model} at {endpoint.url}: {then}", BLUE)
    return 0


def _undo(settings: Settings, *, is_dry: bool) -> int:
    before, after, kept = settings.undo_planned()
    print(difference(settings.path, before, after), end="")
    for name in kept:
        note(f"{name} was changed since, and stays as it is")
    if not is_dry:
        settings.undo(after)
    return 0


async def _told(agent: Agent, program: str, environ: Mapping[str, str]) -> str:
    """Return the program's output for `Agent.asked`; empty without one, or if it is too slow."""
    if not agent.asked:
        return ""
    with trio.move_on_after(_ANSWER_SECONDS):
        done = await trio.run_process(
            [program, *agent.asked],
            env=dict(environ),
            capture_stdout=True,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return done.stdout.decode(errors="replace")
    return ""


async def _launch(
    agent: Agent, command: Sequence[str], server: AgentServer, *, is_dry: bool
) -> int:
    with tempfile.TemporaryDirectory(prefix="trioserve-launch-") as name:
        async with server.endpoint(must_run=is_dry) as endpoint:
            folder = Path(name)
            _check_name(agent, endpoint.model)
            program, *arguments = command
            told = await _told(agent, program, server.environ)
            settings = agent.settings(attrs.evolve(endpoint, told=told), folder)
            whole = [program, *settings.arguments, *arguments]
            if is_dry:
                _show(settings, whole)
                return 0
            for file, text in settings.files.items():
                (folder / file).write_text(text, encoding="utf-8")
            _introduce(agent, endpoint)
            kept = {key: text for key, text in server.environ.items() if key not in agent.cleared}
            return await _attend(whole, kept | dict(settings.environ))


def _show(settings: AgentSettings, command: Sequence[str]) -> None:
    """Print how an agent would be started: in the words of a shell, and its files."""
    for name, text in settings.environ.items():
        print(f"{name}={shlex.quote(text)} \\")
    print(shlex.join(command))
    for name, text in settings.files.items():
        print(f"\n# {name}\n{text.rstrip()}")


def _check_name(agent: Agent | Configured, model: str) -> None:
    """Check that an agent reads a name as one, and not as a flag or a place in its settings."""
    if model.startswith("-") or {*model} & {*"{}"}:
        problem = f"{agent.title} cannot use a model with the name {model!r}"
        raise UnavailableError(f"{problem}; give it another one with --alias")


def _introduce(agent: Agent, endpoint: Endpoint) -> None:
    where = f"at {endpoint.url}, with a context of {endpoint.context} tokens"
    note(f"{agent.title} uses {endpoint.model} {where}", BLUE)
    if endpoint.context < 2 * agent.first_prompt:
        note(
            f"this context is too small: the first request of {agent.title} has about "
            f"{agent.first_prompt} tokens. See --ctx-size, and take a model with a longer context."
        )


@contextmanager
def _leaving(*numbers: signal.Signals) -> Iterator[None]:
    """Leave signals to the programs of the block. If ignored, they would ignore them, too."""
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _attend(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program in the foreground; returns its exit code. When cancelled, it is killed."""
    # A terminal sends SIGINT and SIGQUIT to the program, too. Other signals are passed on.
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

#: Flags that say which server and which model it is.
_OF_ADDRESS = frozenset(
    BY_FIELD[field].names[-1] for field in (
        "model", "hf_repo", "hf_file", "hf_token", "model_url", "offline", "host", "port",
        "api_prefix", "api_keys", "keys_file", "ssl_cert_file", "ssl_key_file", "log_level",
        "log_file", "models_dir", "models_preset",
    )
)  # fmt: skip


@attrs.frozen
class AgentServer:
    """The server that an agent is to use: one that runs, or else one that is started.

    `sends` are fields of the flags that requests have. With a flag of the fields `own`, one is
    started in any case, unless it is named by its URL. `may_be_socket`: it may have no port.
    """

    url: str | None
    config: Config
    flags: Sequence[str]
    environ: Mapping[str, str]
    sends: Collection[str] = ()
    own: Collection[str] = ()
    may_be_socket: bool = False

    @asynccontextmanager
    async def endpoint(self, *, must_run: bool = False) -> AsyncIterator[Endpoint]:
        """Give the model for the length of a block, once it is loaded; otherwise as `place`."""
        async with self.place(must_run=must_run) as (address, model):
            yield await self._load(address, model)

    @asynccontextmanager
    async def place(self, *, must_run: bool = False) -> AsyncIterator[tuple[Address, str]]:
        """Give the server and the name of the model for the length of a block.

        At its end, a server that this command has started ends. With `must_run`, none is started.

        Raises:
            TrioServeError: there is no such model, or no server can be started.
        """
        running = await self._running()
        if running is not None:
            self._warn(running[0])
            yield running
            return
        if must_run:
            raise UnavailableError(
                f"No server at {Address.of(self.url, self.config)} has this model. Start one with "
                "`trioserve serve`, or name its address with --url."
            )
        async with started(self.flags, self.config, self.environ) as address:
            yield address, only(await models_at(address))

    @property
    def _set(self) -> Collection[str]:
        """The fields that the command line sets."""
        return parse(self.flags, {}).options

    def _warn(self, address: Address) -> None:
        """Name the flags that a server which runs already cannot have."""
        names = [BY_FIELD[field].names[-1] for field in self._set if field not in self.sends]
        if lost := [name for name in names if name not in _OF_ADDRESS]:
            note(f"{', '.join(lost)} has no effect: the server at {address} runs already")

    async def _running(self) -> tuple[Address, str] | None:
        """The server that has the model; None if one is to be started. Raises TrioServeError."""
        address = Address.of(self.url, self.config)
        if self.url is None and not set(self.own).isdisjoint(self._set):
            return None
        if address.socket_path is not None and not self.may_be_socket:
            if self.url is not None:
                raise ConfigError("agents need an address with a port; --url names a Unix socket")
            return None
        try:
            models = await models_at(address)
        except TrioServeError:
            if self.url is not None:
                raise
            return None  # no server, or one of another kind
        name = self.config.model_named
        found = only(models) if name is None else named(models, name)
        if found is None and self.url is not None:
            raise ConfigError(f"{address} has no model {name}; it has {names_of(models)}")
        return None if found is None else (address, found)

    async def _load(self, address: Address, model: str) -> Endpoint:
        """Describe a model, which a router loads for that."""
        states = {one.id: one.state for one in await models_at(address)}
        async with client_of(address) as client:
            with ProgressReport(sys.stderr) as report:
                report.tell(f"Loading {model}", 0.0)
                if states.get(model) == "unloaded":  # which no GET changes
                    await client.ask("/tokenize", {"model": model, "content": ""}, form=msgspec.Raw)
                props = await props_of(client, model)
        if not (n_ctx := props.default_generation_settings.n_ctx):
            raise UnavailableError(f"{address} does not tell how long requests to {model} may be.")
        return Endpoint(
            url=address.url,
            model=model,
            context=n_ctx,
            sees_images=props.modalities.vision,
            searches_web=props.searches_web,
            is_toy=props.is_toy,
            api_key=address.api_key or NO_KEY,
        )
