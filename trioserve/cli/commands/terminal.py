"""``trioserve run``: a chat with a model in the terminal, or one answer."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import trio

from trioserve.cli.agents import Endpoint
from trioserve.cli.commands.launch import AgentServer
from trioserve.cli.options import Arguments, parse_flags
from trioserve.cli.signals import run_foreground
from trioserve.cli.terminal.chat import TerminalChat
from trioserve.cli.terminal.prompt import reading
from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.models import EXAMPLE_PROMPTS, TOY
from trioserve.remote.client import connected_to

#: Flags beside those of sampling that are sent with a request: by their fields in a `Config`, the
#: fields of the request, and what makes values of them.
_SENT: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "chat_template_kwargs": ("chat_template_kwargs", json.loads),
    "grammar": ("grammar", str),
    "json_schema": ("json_schema", json.loads),
    "n_predict": ("max_tokens", int),
    "reasoning": ("enable_thinking", {"on": True, "off": False}.get),
    "reasoning_budget": ("reasoning_budget", int),
    "reasoning_effort": ("reasoning_effort", str),
    "reasoning_format": ("reasoning_format", str),
}


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    words, flags = [*given.words], [*given.flags]
    if words and parse(flags, {}).config.model_named is None:
        flags += ["--model", words.pop(0)]
    parsed = parse_flags(flags, given.environ)
    prompt = " ".join(words)
    if not sys.stdin.isatty():
        prompt = "\n\n".join(filter(None, [prompt, sys.stdin.read().strip()]))
        if not prompt:
            raise ConfigError("run needs a prompt, as an argument or on standard input")
    fields = [one for one in parsed.options if one.startswith("sampling.") or one in _SENT]
    settings = settings_of(fields, parsed.config)
    server = AgentServer(given["url"], parsed.config, flags, given.environ, sends=fields)
    return run_foreground(partial(_run, server, prompt, settings, verbose=given["verbose"]))


def settings_of(fields: Iterable[str], config: Config) -> dict[str, Any]:
    """Make the fields of a request for fields of a configuration, which a command line has set."""
    settings = {}
    for field in fields:
        name, read = _SENT.get(field, (field.removeprefix("sampling."), lambda value: value))
        if (value := read(attrgetter(field)(config))) is not None:
            settings[name] = value
    return settings


async def _run(server: AgentServer, prompt: str, settings: dict[str, Any], *, verbose: bool) -> int:
    async with (
        server.endpoint() as endpoint,
        connected_to(endpoint.url, api_key=endpoint.api_key) as client,
    ):
        chat = TerminalChat(
            client,
            endpoint.model,
            sys.stdout,
            aside=sys.stderr if prompt else sys.stdout,
            context=endpoint.context,
            settings=settings,
            shows=2 if verbose else int(not prompt and sys.stdout.isatty()),
        )
        async with alongside(partial(_stop_answers, chat)):
            if not prompt:
                print(_greeting(endpoint))
                await _converse(chat)
                return 0
            has_answer = await chat.say(prompt)
    return 128 + signal.SIGINT if chat.was_stopped else int(not has_answer)


async def _converse(chat: TerminalChat) -> None:
    await chat.list_models()
    async with reading(chat) as read:
        await chat.converse(read)


def _greeting(endpoint: Endpoint) -> str:
    text = f"{endpoint.model}: {endpoint.context} tokens. /help lists commands."
    return f"{text}\nIt {TOY}. Try: {'; '.join(EXAMPLE_PROMPTS)}" if endpoint.is_toy else text


async def _stop_answers(chat: TerminalChat) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async for _ in signals:
            chat.stop()
