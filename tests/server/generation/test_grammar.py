"""Grammars through the server: compiled off the event loop, before the request is submitted."""

from __future__ import annotations

import math
import threading
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from tests.support.scripted_server import serve, within
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    ServerClosingError,
    UnavailableError,
)
from trioserve.fair_limiter import ThreadTime
from trioserve.server import Server
from trioserve.testing import ScriptedBackend
from trioserve.types import FinishReason, Grammar

DIGITS = Grammar("regex", "[0-9]+", param="grammar")


def digits(prompt: str) -> str:
    return "123"


class Gate:
    """Holds up the thread that compiles, until it is opened."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, grammar: Grammar) -> None:
        self.threads.append(threading.current_thread())
        self.arrived.set()
        assert self.opened.wait(10)

    async def wait(self) -> None:
        await trio.to_thread.run_sync(self.arrived.wait)


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def test_an_output_follows_its_grammar() -> None:
    async with serve(ScriptedBackend(digits)) as server:
        assert (await server.complete("x", grammar=DIGITS)).text == "123"
        with pytest.raises(EngineError, match="does not follow"):
            await server.complete("x", grammar=Grammar("json_object"))
        assert (await server.complete("x")).text == "123"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(", param="grammar"),
        Grammar("json_schema", "{", param="response_format"),
        Grammar("gbnf", 'root ::= "a"'),
    ],
)
async def test_a_grammar_that_cannot_be_used(grammar: Grammar) -> None:
    async with serve(ScriptedBackend(digits)) as server:
        with pytest.raises(InvalidRequestError) as caught:
            async with server.stream_complete("x", grammar=grammar):
                pytest.fail("it was submitted")
        assert caught.value.param == grammar.param
        assert len(server.lifecycle.services.dispatcher) == 0


async def test_compiling_does_not_hold_up_the_event_loop(gate: Gate) -> None:
    backend = ScriptedBackend(digits)
    backend.on_compile = gate
    async with serve(backend) as server, trio.open_nursery() as nursery:
        texts: list[str] = []

        async def constrained() -> None:
            texts.append((await server.complete("x", grammar=DIGITS)).text)

        nursery.start_soon(constrained)
        await gate.wait()
        assert (await server.complete("y")).text == "123"
        assert texts == []
        assert gate.threads[0] is not threading.current_thread()
        gate.opened.set()
    assert texts == ["123"]


async def test_cancelling_while_it_compiles(gate: Gate) -> None:
    backend = ScriptedBackend(digits)
    backend.on_compile = gate
    async with serve(backend) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.complete("x", grammar=DIGITS))
            await gate.wait()
            nursery.cancel_scope.cancel()
        assert len(server.lifecycle.services.dispatcher) == 0
        assert (await server.complete("y")).text == "123"
        gate.opened.set()
        assert (await server.complete("x", grammar=DIGITS)).text == "123"
    assert backend.n_samplers == 0


@pytest.mark.parametrize(
    ("seconds", "cpu", "error"),
    [
        (math.inf, 9.0, InvalidRequestError),
        (math.inf, 1.0, UnavailableError),  # it had to wait for the CPU
        (3, 9.0, DeadlineExceededError),
    ],
)
async def test_compiling_takes_bounded_time(
    gate: Gate,
    seconds: float,
    cpu: float,
    error: type[Exception],
    mock_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ThreadTime, "seconds", cpu)
    backend = ScriptedBackend(digits)
    backend.on_compile = gate
    async with serve(backend) as server:
        async with trio.open_nursery() as nursery:

            async def request() -> None:
                with pytest.raises(error):
                    params = await server.params({"grammar": DIGITS})
                    opened = server.stream_all(["x"], params, context=within(seconds))
                    async with opened:
                        raise AssertionError("unreachable")

            nursery.start_soon(request)
            await gate.wait()
            mock_clock.jump(11)
        assert len(server.lifecycle.services.dispatcher) == 0
        gate.opened.set()


async def test_grammars_of_one_client_do_not_hold_up_those_of_another(gate: Gate) -> None:
    backend = ScriptedBackend(digits)
    backend.on_compile = lambda grammar: None if grammar == DIGITS else gate(grammar)
    async with serve(backend) as server, trio.open_nursery() as nursery:
        for n in range(1, 21):
            costly = Grammar("regex", f"[0-9]{{{n}}}", param="grammar")
            nursery.start_soon(partial(server.complete, "x", grammar=costly, client="first"))
        await gate.wait()
        answer = await server.complete("y", grammar=DIGITS, client="second")
        assert answer.text == "123"
        gate.opened.set()
        nursery.cancel_scope.cancel()


async def test_a_full_queue_is_known_before_compiling() -> None:
    backend = ScriptedBackend(lambda _: "1" * 900, n_slots=1)
    compiled: list[Grammar] = []
    backend.on_compile = compiled.append
    async with (
        serve(backend, max_queue=1) as server,
        server.stream_complete("a") as first,
        server.stream_complete("b"),
    ):
        await anext(first)
        with pytest.raises(QueueFullError):
            await server.complete("x", grammar=DIGITS)
        assert compiled == []


async def test_closing_waits_for_the_thread_that_compiles(gate: Gate) -> None:
    backend = ScriptedBackend(digits)
    backend.on_compile = gate
    async with serve(backend) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: server.complete("x", grammar=DIGITS))
            await gate.wait()
            nursery.cancel_scope.cancel()
        threading.Timer(0.05, gate.opened.set).start()
    assert gate.opened.is_set() and backend.closed


async def test_draining_refuses_what_has_just_been_compiled(gate: Gate) -> None:
    backend = ScriptedBackend(digits)
    backend.on_compile = gate
    async with serve(backend) as server, trio.open_nursery() as nursery:

        async def request() -> None:
            with pytest.raises(ServerClosingError):
                await server.complete("x", grammar=DIGITS)

        nursery.start_soon(request)
        await gate.wait()
        await server.drain(1)
        gate.opened.set()


async def test_a_real_model_answers_with_json() -> None:
    schema = '{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2}'
    grammar = Grammar("json_schema", schema, param="response_format")
    async with Server(Config(threads=1, ctx_size=512, parallel=2), load=llama.load) as server:
        completion = await server.complete("A list:", grammar=grammar, max_tokens=60)
        assert completion.finished.reason is FinishReason.EOS
        assert completion.text.count('"') == 4
        answer = await server.chat(
            [{"role": "user", "content": "List!"}], grammar=grammar, max_tokens=60
        )
        assert answer.message.content.startswith("[")
        with pytest.raises(InvalidRequestError, match="#/not") as caught:
            refused = '{"not": {"type": "null"}}'
            await server.complete("x", grammar=Grammar("json_schema", refused, param="json"))
        assert caught.value.param == "json"
