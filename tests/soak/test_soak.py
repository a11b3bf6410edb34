"""The soak test's own parts, on a server within the test; `make soak` runs the whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.soak import catalogue, curve, verdict
from tests.soak.checked import CheckedClient, quiet_answers
from tests.soak.clients import Client
from tests.soak.process import Sample
from tests.soak.tally import Tally
from tests.support.http_server import serving, serving_script
from trioserve import llama
from trioserve.app import create_app
from trioserve.config import Config

#: Those that take seconds.
SLOW = (Client.read_slowly, Client.read_nothing)


@pytest.mark.system
async def test_clients_find_no_fault(tmp_path: Path) -> None:
    config = Config(
        api_keys=catalogue.KEYS,
        threads=1,
        ctx_size=2048,
        max_body_size=catalogue.MAX_BODY,
        metrics_endpoint=True,
        props_endpoint=True,
        slot_save_path=str(tmp_path),
        tools=("read_file",),
        tools_dir=(str(tmp_path),),
        timeout=1.0,
    )
    app, tally = create_app(config, load=llama.load), Tally()
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        source = random.Random(1)
        quiet = await quiet_answers(Client(url, tally, source), source, 1)
        clients = [CheckedClient(url, tally, random.Random(n), quiet) for n in range(8)]
        with trio.fail_after(120):
            for act, _ in clients[0].acts:
                async with trio.open_nursery() as nursery:
                    for client in clients if act not in SLOW else ():
                        nursery.start_soon(act, client)
            await clients[0].check_batches()
    assert "\n".join(tally.sentences()) == ""
    assert tally.outcomes["compared"]["equal"] >= len(clients)
    assert tally.n_requests >= 6 * len(clients)
    assert "gone: " in tally.table()  # where in the exchange is drawn


async def test_a_fault_is_told() -> None:
    tally = Tally()
    async with serving_script() as (url, _):
        client = Client(url, tally, random.Random(0))
        data, head = catalogue.request("GET", "/nowhere")
        for _ in range(2):
            await client.ask_alone(catalogue.Ask(name="a request", data=data, head=head))
    (fault,) = tally.sentences()
    assert fault.startswith("2 times: a request: status 404, not 200")
    assert "2 404" in tally.table()


def samples(*memory: int) -> list[Sample]:
    return [
        Sample(
            seconds=second,
            rss_kib=rss_kib,
            descriptors=10,
            threads=4,
            requests=3 * second,
            tokens=50 * second,
        )
        for second, rss_kib in enumerate(memory)
    ]


def test_growth_is_measured_after_the_warm_up() -> None:
    assert verdict.growth(samples(*range(100), *[200] * 501), 600) == 0
    assert verdict.growth(samples(*range(1000, 1601)), 600) == pytest.approx(1570 / 1150 - 1)
    assert verdict.growth(samples(*range(100, 201)), 100) == pytest.approx(195 / 155 - 1)


def test_the_curve(tmp_path: Path) -> None:
    taken = samples(*range(1000, 2000))
    curve.write_csv(tmp_path / "new" / "soak.csv", taken)
    assert curve.read_csv(tmp_path / "new" / "soak.csv") == taken
    drawn = curve.svg(taken)
    assert drawn.count("<polyline") == 5
    assert len(drawn) < 50_000
    assert curve.svg(taken[:1]).count("<polyline") == 5
