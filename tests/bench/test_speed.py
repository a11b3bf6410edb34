"""Measurements of a server that answers by a script, and what is made of their times."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest

from tests.support.canned_server import serving_bytes
from tests.support.http_server import serving_script
from trioserve.bench import report, speed
from trioserve.bench.client import Answer, Server
from trioserve.bench.report import Result, Table
from trioserve.bench.speed import Sample, Workload
from trioserve.errors import TrioServeError, UnavailableError
from trioserve.remote.client import connected_to
from trioserve.testing import ScriptedBackend


def answer(*times: float, sent: float = 0.0, cached: int | None = 0, n_prompt: int = 100) -> Answer:
    """An answer with one token at each time."""
    return Answer(sent=sent, times=times, n_prompt=n_prompt, n_cached=cached, n_tokens=len(times))


# -- what times mean


def test_the_speed_of_prompts_counts_until_the_last_client_has_its_first_token() -> None:
    sample = speed.sample_of(Workload(n_prompt=100, clients=2), [answer(0.5), answer(2.0)])
    assert sample.tokens_per_s == 200 / 2.0
    assert sample.ttft == pytest.approx(1250)
    assert (sample.itl_p50, sample.notes) == (None, ())


def test_tokens_in_the_cache_are_not_counted() -> None:
    test = Workload(n_prompt=40, depth=60)
    assert speed.sample_of(test, [answer(2.0, cached=60)]).tokens_per_s == 20
    unknown = speed.sample_of(test, [answer(2.0, cached=None)])
    assert unknown.tokens_per_s == 20
    assert unknown.notes == ("the server does not report how much of a prompt was cached",)
    lost = speed.sample_of(test, [answer(2.0, cached=10)])
    assert lost.tokens_per_s == 45
    assert lost.notes == ("less than half of the depth was in the cache",)


def test_the_speed_of_generation_leaves_the_prompt_out() -> None:
    answers = [answer(1.0, 1.1, 1.4), answer(1.2, 1.3, 2.0)]
    sample = speed.sample_of(Workload(n_gen=3, clients=2), answers)
    assert sample.tokens_per_s == pytest.approx(4 / 1.0)
    assert sample.itl_p50 == pytest.approx(200)
    assert sample.notes == ()
    short = speed.sample_of(Workload(n_gen=4), answers[:1])
    assert short.notes == ("outputs are shorter than 4 tokens",)


def test_an_answer_that_comes_at_once_has_the_speed_of_its_request() -> None:
    one = attrs.evolve(answer(2.0), n_tokens=11)
    assert speed.sample_of(Workload(n_gen=11), [one]).tokens_per_s == 5


def test_all_values_are_combined() -> None:
    names = [(one.name, one.clients) for one in speed.workloads_of([8, 0], [4], [0, 32], [1, 2])]
    assert names == [
        *[("pp8", 1), ("tg4", 1), ("pp8", 2), ("tg4", 2)],
        *[("pp8 @ d32", 1), ("tg4 @ d32", 1), ("pp8 @ d32", 2), ("tg4 @ d32", 2)],
    ]


# -- a server


@asynccontextmanager
async def measured(name: str, prompts: list[str]) -> AsyncIterator[Server]:
    """A server that answers endlessly, and keeps the prompts that it gets."""

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "x" * 1000

    backend = ScriptedBackend(script, n_slots=2, n_ctx=8192)
    async with serving_script(backend) as (url, _), connected_to(url, n_kept=0) as client:
        server = Server(name=name, client=client, model="scripted", seed=name)
        yield await server.calibrated()


async def test_no_prompt_is_sent_twice_and_all_have_the_length() -> None:
    prompts: list[str] = []
    async with measured("a", prompts) as a, measured("b", prompts) as b:
        n_before = len(prompts)
        for test in (Workload(n_prompt=100, clients=2), Workload(n_gen=5)):
            samples = await speed.interleave([a, b], test, 3, lambda line: None)
            assert {name: len(runs) for name, runs in samples.items()} == {"a": 3, "b": 3}
        new = prompts[n_before:]
    assert len(new) == len(set(new)) == 2 * 3 * (2 + 1)
    assert len({prompt[:20] for prompt in new}) == len(new)
    # A token of this server is a byte; prompts are as long as whole words allow.
    assert {abs(len(prompt) - 100) < 5 for prompt in new if len(prompt) > 50} == {True}


async def test_what_is_in_the_cache_before_is_the_beginning_of_the_prompt() -> None:
    prompts: list[str] = []
    async with measured("a", prompts) as server:
        del prompts[:]
        sample = await speed.measure(server, Workload(n_prompt=50, depth=100), "s")
    before, prompt = prompts
    assert prompt.startswith(f"{before} ")
    assert abs(sample.n_tokens - 50) < 6
    assert sample.notes == ()


async def test_servers_are_measured_in_turn() -> None:
    lines: list[str] = []
    async with measured("a", []) as a, measured("b", []) as b:
        await speed.interleave([a, b], Workload(n_gen=2), 3, lines.append)
    assert [line[-1] for line in lines] == ["a", "b", "b", "a", "a", "b"]


def canned(*events: dict[str, object]) -> bytes:
    """A streamed answer, with its head."""
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + body + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        ([{"choices": [{"text": "a"}]}], "without the number of tokens"),
        ([{"choices": [], "usage": {"prompt_tokens": 3}}], "without text"),
        ([{"usage": {"prompt_tokens": 10**400}}], "does not answer as expected"),
        ([{"usage": {"prompt_tokens": -1}}], "does not answer as expected"),
    ],
)
async def test_an_answer_that_cannot_be_measured(
    events: list[dict[str, object]], missing: str
) -> None:
    with serving_bytes(canned(*events)) as address:
        async with connected_to(f"http://{address.host}:{address.port}", n_kept=0) as client:
            server = Server(name="a", client=client, model="m", seed="s")
            with pytest.raises(UnavailableError, match=missing):
                await server.complete("x", 1)


async def test_other_servers_report_less() -> None:
    """A server with the fewest members that are needed."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    answer = canned({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}], "usage": usage})
    with serving_bytes(answer) as address:
        async with connected_to(f"http://{address.host}:{address.port}", n_kept=0) as client:
            found = await Server(name="a", client=client, model="m", seed="s").complete("x", 1)
    assert (found.n_prompt, found.n_tokens, found.n_cached) == (3, 2, None)


async def test_a_refused_request_ends_the_measurement() -> None:
    async with measured("a", []) as server:
        with pytest.raises(TrioServeError, match="context"):
            await speed.measure(server, Workload(n_prompt=10_000, clients=2), "s")


# -- what is shown


def results(*clients: int) -> list[Result]:
    """Two servers; the second one is half as fast."""
    return [
        Result(
            Workload(n_gen=16, clients=count),
            {
                "ours": [Sample(tokens_per_s=rate * count, ttft=5.0, itl_p50=2.0, itl_p99=3.0)
                         for rate in (10.0, 12.0, 11.0)],
                "theirs": [Sample(tokens_per_s=rate * count / 2, ttft=7.0, notes=("slow",))
                           for rate in (10.0, 12.0, 11.0)],
            },
        )
        for count in clients
    ]  # fmt: skip


def test_a_table_has_a_line_for_each_server() -> None:
    table = Table(is_compared=True)
    lines = (table.head() + table.lines(results(1)[0])).splitlines()
    assert len({len(line) for line in lines}) == 1  # aligned
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert cells == [
        ["tg16", "1", "ours", "11.0 [10.0, 12.0]", "5.0", "2.0", "3.0", "2.00"],
        ["tg16", "1", "theirs", "5.5 [5.0, 6.0]", "7.0", "", "", ""],
    ]
    assert "server" not in Table(is_compared=False).head()
    assert results(1)[0].notes() == ["theirs: slow"]


def test_records_are_for_programs() -> None:
    found = results(1, 4)
    rows = list(csv.DictReader(io.StringIO(report.csv_text(found))))
    assert [(row["clients"], row["server"], row["ratio"]) for row in rows] == [
        ("1", "ours", "2.0"), ("1", "theirs", ""), ("4", "ours", "2.0"), ("4", "theirs", ""),
    ]  # fmt: skip
    whole = json.loads(json.dumps(report.plain(found, {"n_gen": [16]})))
    assert whole["results"][1]["records"][0]["tokens_per_s"] == 44
    assert [s["tokens_per_s"] for s in whole["results"][0]["samples"]["theirs"]] == [5, 6, 5.5]


def test_a_picture_has_curves_or_bars() -> None:
    svg = "{http://www.w3.org/2000/svg}"
    curves = ET.fromstring(report.picture(results(1, 2, 4), "title", "caption"))
    assert len(list(curves.iter(f"{svg}circle"))) == 6
    text = {"".join(one.itertext()) for one in curves.iter(f"{svg}text")}
    assert {"clients at once", "ours", "theirs", "Tokens a second: tg16"} <= text
    bars = ET.fromstring(report.picture(results(1), "title", "caption"))
    assert {"tg16, 1 client"} <= {"".join(one.itertext()) for one in bars.iter(f"{svg}text")}
    deep = [
        Result(Workload(n_gen=16, depth=depth), results(1)[0].samples) for depth in (0, 512, 1024)
    ]
    at = [
        float(one.get("cx", ""))
        for one in ET.fromstring(report.picture(deep, "t", "c")).iter(f"{svg}circle")
    ]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=0.2)  # an axis from 0 is even
