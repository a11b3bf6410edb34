"""Defaults of requests that flags set, and that requests override."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioserve import Config, Server
from trioserve.testing import ScriptedBackend, scripted


@pytest.fixture
def config() -> Config:
    return Config(stop=("o",), n_keep=3, stream_interval_ms=0)


async def test_words_that_end_an_output(config: Config) -> None:
    backend = ScriptedBackend(lambda prompt: "Hello there")
    async with Server(config, load=scripted(backend)) as server:
        assert (await server.params({})).n_keep == 3
        assert (await server.complete("a")).text == "Hell"
        assert (await server.complete("a", stop=("r",))).text == "Hello the"
        assert (await server.complete("a", stop=())).text == "Hello there"


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, ("yes", "no")),
        ({"json_schema": json.dumps({"enum": ["yes", "no"]})}, ('"yes"', '"no"')),
    ],
)
async def test_a_shape_for_all_outputs(settings: dict[str, Any], allowed: tuple[str, ...]) -> None:
    async with Server(Config(ctx_size=512, parallel=1, threads=1, **settings)) as server:
        for prompt in ("Is it so?", "Once upon"):
            assert (await server.complete(prompt, temperature=0.0)).text in allowed
