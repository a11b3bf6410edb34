"""The prefix cache as a side channel: what one client sends is not for others to find out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.clients import client_and_service, client_of_app
from tests.support.families import HERMES
from tests.support.scripted_server import serve
from trioserve.app import create_app
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.params import ToolChoice
from trioserve.config import Config
from trioserve.server.generation.requests import ServerResources, cache_owner
from trioserve.server.keys import Keys
from trioserve.testing import ScriptedBackend
from trioserve.types import CacheRoot, Constraint, Grammar

KEYS = ("key-of-the-victim", "key-of-the-attacker")
VICTIM, ATTACKER = ({"Authorization": f"Bearer {key}"} for key in KEYS)

KNOWN = (
    "All orders over 500 are signed with the number of the account of the one who signs, "
    "and as each clerk at the bank knows by heart it is "
)
SECRET = "7"

#: Requests that must not share: the configuration, fields of the victim, and of the attacker.
SEPARATE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "keys": ({"api_keys": KEYS}, {}, {}),
    "salts, all": ({"api_keys": KEYS, "cache_sharing": "all"}, {"cache_salt": "a"}, {}),
    "salts, no keys": ({}, {"cache_salt": "a"}, {"cache_salt": "b"}),
}
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "no keys": ({}, {}, {}),
    "all": ({"api_keys": KEYS, "cache_sharing": "all"}, {}, {}),
    "one salt": ({}, {"cache_salt": "a"}, {"cache_salt": "a"}),
}
CASES = {name: (*case, True) for name, case in SEPARATE.items()} | {
    name: (*case, False) for name, case in TOGETHER.items()
}


async def cached(client: httpx.AsyncClient, prompt: str, key: Any, **fields: Any) -> int:
    """Continue a prompt; returns how much of it was in the cache."""
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, **fields}
    answer = await client.post("/completion", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    timings = answer.json()["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == answer.json()["tokens_evaluated"]
    return int(timings["cache_n"])


async def recover(probe: Callable[[str], Awaitable[int]]) -> str:
    """Find out the digit after what is known: the guess that is right has more in the cache."""
    found = {digit: await probe(digit) for digit in "0123456789"}
    best = [digit for digit, n_cached in found.items() if n_cached == max(found.values())]
    return best[0] if len(best) == 1 else ""


@pytest.mark.parametrize(
    ("case", "slot"),
    [
        ("keys", -1),
        ("keys", 0),
        ("salts, all", 0),
        ("salts, no keys", -1),
        ("no keys", -1),
        ("one salt", 0),
    ],
)
async def test_a_secret_is_not_recovered_from_the_kv_cache(case: str, slot: int) -> None:
    """With llama.cpp and the bundled model, in any slot and in the victim's."""
    config, of_victim, of_attacker, safe = CASES[case]
    # In a split cache, the first guess may take the sequence and cut it.
    unified = None if safe else True
    app = create_app(Config(ctx_size=2048, threads=1, kv_unified=unified, **config))
    async with client_of_app(app) as client:
        await cached(client, f"{KNOWN}{SECRET}9", VICTIM, id_slot=slot, **of_victim)

        async def probe(digit: str) -> int:
            guess = f"{KNOWN}{digit}!"
            return await cached(client, guess, ATTACKER, id_slot=slot, **of_attacker)

        assert await recover(probe) == ("" if safe else SECRET)
        # Those who are alone with it find all of it again.
        again = await cached(client, f"{KNOWN}{SECRET}9", VICTIM, **of_victim)
        assert again > len(KNOWN) // 4


@pytest.mark.parametrize("case", CASES)
async def test_a_secret_is_not_recovered_from_ram(case: str) -> None:
    config, of_victim, of_attacker, safe = CASES[case]
    backend = ScriptedBackend(n_slots=1, n_ctx=250)
    async with client_and_service(backend, **config) as (client, service):
        cache = service.server.lifecycle.services.loop._scheduler.cache
        await cached(client, f"{KNOWN}{SECRET}9", VICTIM, **of_victim)

        async def probe(digit: str) -> int:
            await cached(client, "z" * 200, ATTACKER, **of_attacker)  # the cache is full of this
            assert len(cache.ram) > 0
            return await cached(client, f"{KNOWN}{digit}!", ATTACKER, **of_attacker)

        assert await recover(probe) == ("" if safe else SECRET)
        assert await cached(client, f"{KNOWN}{SECRET}9", VICTIM, **of_victim) >= len(KNOWN)


def resources_of(config: Config) -> ServerResources:
    return ServerResources(config, Keys(config), None)


def test_a_root_has_neither_key_nor_salt_and_is_the_same_everywhere() -> None:
    sharing = resources_of(Config(api_keys=KEYS))
    one, other = (sharing.cache_root(key, "") for key in KEYS)
    assert len({one, other, sharing.cache_root(KEYS[0], "pepper"), CacheRoot()}) == 4
    assert one == CacheRoot((), "a9577ea30ceeb7901522ce0c06faab2a")
    assert not any(
        text in repr(sharing.cache_root(KEYS[0], "pepper")) for text in (*KEYS, "pepper")
    )
    assert cache_owner(sharing.config, "") == ""  # a program that serves others beside itself
    for config in (Config(), Config(api_keys=KEYS, cache_sharing="all")):
        assert resources_of(config).cache_root(KEYS[0], "") == CacheRoot()
    half = "\ud800"  # as JSON may have it
    assert resources_of(Config()).cache_root("", half) != resources_of(Config()).cache_root("", "")


async def test_a_program_separates_its_users_by_salt_or_by_client() -> None:
    async def n_cached(server: Any, **fields: Any) -> int:
        done = await server.complete("a" * 40, max_tokens=1, **fields)
        return int(done.finished.timings.cache_n)

    async with serve() as server:
        # Without keys, a client is a name for the queue.
        assert [await n_cached(server, client=name) for name in ("x", "y")] == [0, 39]
        assert [await n_cached(server, cache_salt=salt) for salt in "ababc"] == [0, 0, 39, 39, 0]
    async with serve(api_keys=KEYS) as server:
        clients = ("", KEYS[0], KEYS[1], KEYS[0])
        assert [await n_cached(server, client=key) for key in clients] == [0, 0, 0, 39]


async def test_what_was_compiled_for_one_key_is_not_found_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners: list[str] = []
    compile_ = ScriptedBackend.compile

    def record(backend: ScriptedBackend, grammar: Grammar, owner: str = "") -> Constraint:
        owners.append(owner)
        return compile_(backend, grammar, owner)

    monkeypatch.setattr(ScriptedBackend, "compile", record)
    grammar = Grammar("regex", "(?s:.*)")
    async with serve(api_keys=KEYS) as server:
        for key in KEYS:
            await server.complete("aaa", client=key, grammar=grammar)
            await server.chat([{"role": "user", "content": "aaa"}], client=key, grammar=grammar)
        assert owners == [cache_owner(server.config, key) for key in KEYS for _ in range(2)]
    assert len(set(owners)) == 2


def test_the_grammar_of_tools_is_made_anew_for_another_owner() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    make = partial(constrain, HERMES, tools, ToolChoice("required"), parallel=False)
    mine = make(owner="me")
    assert make(owner="me") is mine
    assert make(owner="you") == mine and make(owner="you") is not mine
