"""Work on text in threads: refused before it begins, and left when its request has gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import trio

from tests.support.loop_probe import probing
from tests.support.scripted_server import serve, within
from tests.support.scripts import HI
from tests.support.waiting import patiently, until
from trioserve.errors import ContextLengthExceededError, DeadlineExceededError, TemplateError
from trioserve.fair_limiter import SMALL
from trioserve.server import Server
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import ByteVocab
from trioserve.types import TokenId

LONG = "a" * (SMALL + 1)


class WatchedVocab(ByteVocab):
    """Takes as long as it is not cancelled for texts that begin with "slow"."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.begun = threading.Event()
        self.stopped = threading.Event()

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = False,
        parse_special: bool = True,
        is_fragment: bool = False,
        check: Callable[[int], object] = lambda _n: None,
    ) -> tuple[TokenId, ...]:
        self.n_calls += 1
        if text.startswith("slow"):
            self.begun.set()
            try:
                while True:
                    check(0)
                    self.stopped.wait(0.001)
            finally:
                self.stopped.set()
        check(len(text))
        return super().tokenize(text)


def watched(**settings: int) -> tuple[Server, WatchedVocab]:
    backend = ScriptedBackend(**settings)
    vocab = WatchedVocab()
    backend.vocab = vocab
    return serve(backend), vocab


@pytest.mark.parametrize("prompt", ["a" * 100_000, [97] * 100_000, ["a" * 1000] * 100 + [97]])
async def test_a_prompt_far_too_long_is_not_tokenized(prompt: list[str | int] | str) -> None:
    server, vocab = watched(n_slots=1, n_ctx=64)
    async with server:
        n_calls = vocab.n_calls
        with pytest.raises(ContextLengthExceededError) as caught:
            await server.complete(prompt)
        assert (vocab.n_calls, caught.value.n_ctx) == (n_calls, 64)
        assert caught.value.n_prompt_tokens > 64


async def test_a_prompt_with_too_many_tokens_is_given_up() -> None:
    server, vocab = watched(n_slots=1, n_ctx=64)
    async with server:
        with pytest.raises(ContextLengthExceededError, match="at least 100 tokens"):
            await server.complete("a" * 100)
        assert vocab.n_calls


async def test_text_may_be_longer_than_the_context_where_nothing_follows_it() -> None:
    server, _ = watched(n_slots=1, n_ctx=64)
    async with server:
        assert len(await server.tokenize("a" * 100_000)) == 100_000


async def test_work_is_given_up_with_its_client() -> None:
    server, vocab = watched()
    async with server, trio.open_nursery() as nursery:
        nursery.start_soon(server.tokenize, "slow" + LONG)
        await until(vocab.begun.is_set)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await until(vocab.stopped.is_set)
            assert len(await server.tokenize(LONG)) == len(LONG)


async def test_a_deadline_ends_tokenizing() -> None:
    server, vocab = watched()
    async with server:
        with pytest.raises(DeadlineExceededError):
            fields = {"logit_bias": (("slow" + LONG, 1.0),)}
            await server.params(fields, context=within(0.1))
        assert vocab.stopped.is_set()


async def test_prompts_do_not_wait_for_those_who_only_ask_for_tokens() -> None:
    server, _ = watched(n_slots=1, n_ctx=100_000)
    async with server, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(server.tokenize, "slow" + LONG)
        await trio.testing.wait_all_tasks_blocked()
        with patiently():
            await server.complete(LONG, max_tokens=1)
        nursery.cancel_scope.cancel()


async def test_closing_ends_the_work_and_waits_for_it() -> None:
    server, vocab = watched()
    async with trio.open_nursery() as nursery:
        async with server:
            nursery.start_soon(server.tokenize, "slow" + LONG)
            await until(vocab.begun.is_set)
            nursery.cancel_scope.cancel()
        assert vocab.stopped.is_set()


SLOW = """\
{%- if messages[0].content == 'slow' %}{% for i in range(20000) %}{% set x = i * i %}{% endfor %}
{%- elif messages[0].content == 'endless' %}{% for i in range(20000) %}
{%- for j in range(20000) %}{% set x = i * i %}{% endfor %}{% endfor %}{% endif -%}
{%- for m in messages %}{{ m.content }}{% endfor %}"""


async def test_a_template_that_is_slow_runs_elsewhere() -> None:
    async with serve(chat_template=SLOW) as server:
        assert await server.render(HI) == "Hi"
        for _ in range(2):
            async with probing() as probe:
                assert await server.render([{"role": "user", "content": "slow"}]) == "slow"
            assert probe.held < 0.02
        assert await server.render(HI) == "Hi"
        with pytest.raises(TemplateError, match="does too much work"):
            await server.render([{"role": "user", "content": "endless"}])
