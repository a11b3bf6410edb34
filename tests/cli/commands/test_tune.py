"""`trioserve tune`: the options, the servers, and the verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import trio

from tests.support import head_models
from trioserve.bench.client import Server
from trioserve.bench.search import Flags, Found, Trial
from trioserve.bench.stats import Spread
from trioserve.cli.commands.tune import Servers, drafts_of, factors_of, row_of, verdict
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ModelLoadError


def tried(*flags: str) -> dict[str, tuple[Flags, ...]]:
    config = parse(list(flags), {}).config
    return {one.name: one.options for one in factors_of(config, n_cores=8, n_threads=4)}


def test_what_is_tried_differs_from_the_defaults() -> None:
    factors = tried()
    assert list(factors) == ["threads", "layout", "flash attention", "batch sizes", "drafts"]
    assert factors["threads"] == (("-t", "2"), ("-t", "3"), ("-t", "8"))
    for options in factors.values():
        for option in options:
            parse(list(option), {})  # each is valid


def test_what_the_flags_set_is_not_tried() -> None:
    assert set(tried("-t", "2", "-kvu", "--spec-type", "ngram-mod")) == {
        "flash attention", "batch sizes",
    }  # fmt: skip
    assert "batch sizes" not in tried("-b", "512")


@pytest.mark.parametrize("is_apart", [False, True])
def test_heads_that_the_model_has_are_tried(tmp_path: Path, is_apart: bool) -> None:
    if is_apart:
        model, head = head_models.write_apart(tmp_path, "glm4moe")
    else:
        model = head = head_models.write_mtp(tmp_path, "glm4moe")
    config = Config(model=str(model))
    drafts = drafts_of(config)
    assert drafts == ["ngram-simple", "ngram-mod", "draft-mtp", "auto"]
    options = factors_of(config, 8, 4, drafts)[-1].options
    for option in options:
        parse(list(option), {})
    assert options[2:] == (("--spec-type", "draft-mtp"), ("--spec-type", "auto"))
    named = attrs.evolve(config, spec_draft_model=str(head))
    assert drafts_of(named) == drafts_of(Config()) == ["ngram-simple", "ngram-mod"]


async def test_a_few_servers_run_and_the_least_recently_used_is_stopped() -> None:
    running: list[Flags] = []

    @asynccontextmanager
    async def start(flags: Flags) -> AsyncIterator[Server]:
        if flags == ("broken",):
            raise ModelLoadError("It does not fit.")
        running.append(flags)
        try:
            yield cast(Server, object())
        finally:
            running.remove(flags)

    async with trio.open_nursery() as nursery:
        servers = Servers(nursery, start)
        first = await servers.get(())
        assert await servers.get(()) is first
        await servers.get(("a",))
        assert running == [("a",)]
        servers.limit = 2
        await servers.get(("b",))
        await servers.get(("a",))
        await servers.get(("c",))
        assert running == [("a",), ("c",)]
        with pytest.raises(ModelLoadError):
            await servers.get(("broken",))
        nursery.cancel_scope.cancel()
    assert running == []


def trial(outcome: str, **more: Any) -> Trial:
    return Trial(
        factor="threads",
        flags=("-t", "1"),
        gain=Spread(1.2, 1.1, 1.3),
        noise=0.04,
        kinds={"prompt": 1.1, "1 stream": 1.3},
        outcome=outcome,
        **more,
    )


def test_the_verdict() -> None:
    better = trial("better")
    assert row_of(better) == ("threads", "-t 1", "1.20 [1.10, 1.30]", "4%", "better")
    found = Found(flags=("-t", "1"), final=better, is_complete=True)
    said = verdict(found, [better])
    assert "The best flags are -t 1: 1.20 [1.10, 1.30] times the defaults' speed" in said
    assert ["prompt", "1.10"] in [line.split() for line in said.splitlines()]
    none = verdict(Found(flags=(), final=None, is_complete=False), [trial("no difference")])
    assert "No flags are faster than the defaults beyond the noise of 4%." in none
    assert "The time was up before all factors were tried" in none


@pytest.mark.system
def test_the_bundled_model(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    # Everything but the drafts is given, so that it is short.
    flags = ["-t", "1", "-no-kvu", "-fa", "on", "-b", "512", "-np", "2", "-c", "4096"]
    argv = [sys.executable, "-m", "trioserve", "tune", "--seconds", "30", "--json", str(file)]
    done = subprocess.run([*argv, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    whole = json.loads(file.read_text())
    assert {one["factor"] for one in whole["trials"]} == {"drafts"}
    compared = [one for one in whole["trials"] if one["kinds"]]
    for one in compared:
        assert set(one["kinds"]) == {"prompt", "1 stream", "2 streams", "repeated text"}
    assert done.stdout.splitlines()[0].split() == ["FACTOR", "FLAGS", "SPEED", "NOISE", "RESULT"]
    assert done.stdout.rstrip().splitlines()[-1]
