"""`GET /metrics`: llama-server's names, our histograms, and what each request adds."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clients import client_of
from tests.support.http_server import connected, post, serving_script
from trioserve.config import Config
from trioserve.server import Server
from trioserve.server.observers import metrics
from trioserve.server.observers.metrics import Metrics
from trioserve.server.observers.observer import RequestEnd, RequestInfo, RequestRecord
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import (
    CacheRoot,
    CancelReason,
    EngineCounters,
    EngineStatus,
    FinishReason,
    Prompt,
    SlotStatus,
    Task,
    Timings,
    WaitingStatus,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")

#: Of llama-server, in its order: name and type.
LLAMACPP = [
    ("prompt_tokens_total", "counter"),
    ("prompt_tokens_cached_total", "counter"),
    ("prompt_seconds_total", "counter"),
    ("tokens_predicted_total", "counter"),
    ("tokens_predicted_seconds_total", "counter"),
    ("n_decode_total", "counter"),
    ("n_tokens_max", "counter"),
    ("spec_decode_num_draft_tokens_total", "counter"),
    ("spec_decode_num_accepted_tokens_total", "counter"),
    ("spec_decode_num_drafts_total", "counter"),
    ("prompt_tokens_seconds", "gauge"),
    ("predicted_tokens_seconds", "gauge"),
    ("requests_processing", "gauge"),
    ("requests_deferred", "gauge"),
    ("n_busy_slots_per_decode", "gauge"),
]


def read(text: str) -> dict[str, float]:
    """The samples, by name and labels, without the label `model_name`."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r',model_name="[^"]*"|model_name="[^"]*",?', "", name).replace("{}", "")
            assert name not in found, f"{name} is there twice"
            found[name] = float(value)
    return found


REQUEST = RequestInfo(task_id=1, model="m", n_prompt=9)


def ended(**end: Any) -> RequestRecord:
    return RequestRecord(REQUEST, RequestEnd(**end))


def status(**counters: float) -> EngineStatus:
    return EngineStatus(slots=(), waiting=(), counters=EngineCounters(**counters))


def test_the_names_and_types_are_those_of_llama_server() -> None:
    text = Metrics().render(status()).decode()
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE llamacpp:")]
    assert types == [[f"llamacpp:{name}", kind] for name, kind in LLAMACPP]
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP llamacpp:")]
    assert helps == [f"llamacpp:{name}" for name, _ in LLAMACPP]


def test_prometheus_can_read_it() -> None:
    metrics = Metrics()
    metrics.on_event(ended(n_output=0, total_s=0.5, error=RuntimeError()))
    families = list(text_string_to_metric_families(metrics.render(status()).decode()))
    names = {family.name for family in families}
    assert {"trioserve:time_to_first_token_seconds", "llamacpp:requests_deferred"} <= names
    assert all(family.documentation for family in families)


def test_a_request_is_counted_by_how_it_ended() -> None:
    metrics = Metrics()
    timings = Timings(queue_ms=20, prompt_n=7, prompt_ms=80, predicted_n=11, predicted_ms=500)
    metrics.on_event(ended(n_output=11, total_s=0.7, timings=timings, finish=FinishReason.LIMIT))
    metrics.on_event(ended(n_output=2, total_s=0.1, cancelled=CancelReason.DISCONNECT))
    metrics.on_event(ended(n_output=0, total_s=0.1, error=RuntimeError()))
    seen = read(metrics.render(status()).decode())
    assert seen['trioserve:request_success_total{reason="limit"}'] == 1
    assert seen['trioserve:request_success_total{reason="eos"}'] == 0
    assert seen['trioserve:request_cancelled_total{reason="disconnect"}'] == 1
    assert seen['trioserve:request_failed_total{type="server_error"}'] == 1
    assert seen['trioserve:request_failed_total{type="unavailable_error"}'] == 0
    assert seen["trioserve:time_to_first_token_seconds_sum"] == pytest.approx(0.1)
    assert seen["trioserve:request_time_per_output_token_seconds_sum"] == pytest.approx(0.05)
    assert seen["trioserve:request_queue_time_seconds_sum"] == pytest.approx(0.02)
    assert seen["trioserve:e2e_request_latency_seconds_sum"] == pytest.approx(0.7)
    assert seen["trioserve:e2e_request_latency_seconds_count"] == 1
    assert seen["trioserve:request_prompt_tokens_count"] == 3
    assert seen["trioserve:request_generation_tokens_sum"] == 13
    assert seen['trioserve:time_to_first_token_seconds_bucket{le="0.05"}'] == 0
    assert seen['trioserve:time_to_first_token_seconds_bucket{le="0.25"}'] == 1


def test_speeds_are_means_since_the_last_look() -> None:
    metrics = Metrics()
    metrics.on_event(
        ended(
            n_output=11,
            total_s=1,
            timings=Timings(predicted_n=11, predicted_ms=500),
            finish=FinishReason.EOS,
        )
    )
    first = read(metrics.render(status(prompt_tokens=100, prompt_s=0.5)).decode())
    assert first["llamacpp:predicted_tokens_seconds"] == pytest.approx(20)
    assert first["llamacpp:prompt_tokens_seconds"] == pytest.approx(200)
    second = read(metrics.render(status(prompt_tokens=130, prompt_s=0.6)).decode())
    assert second["llamacpp:predicted_tokens_seconds"] == 0
    assert second["llamacpp:prompt_tokens_seconds"] == pytest.approx(300)
    assert second["llamacpp:tokens_predicted_seconds_total"] == pytest.approx(0.5)


def test_ours_are_histograms_counters_and_gauges_without_times_of_creation() -> None:
    lines = Metrics().render(status()).decode().splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE trioserve:"))
    assert types["trioserve:request_queue_time_seconds"] == "histogram"
    assert types["trioserve:request_success_total"] == "counter"
    assert types["trioserve:kv_cells"] == "gauge"
    assert not any("_created" in line for line in lines)
    bounds = [
        float(line.partition('le="')[2].partition('"')[0])
        for line in lines
        if line.startswith("trioserve:request_prompt_tokens_bucket")
    ]
    assert bounds[:4] == [1, 2, 5, 10]
    assert bounds[-2:] == [500_000, float("inf")]


def test_two_servers_do_not_mix() -> None:
    one, other = Metrics(), Metrics()
    one.on_event(ended(n_output=1, total_s=1, finish=FinishReason.EOS))
    seen = read(other.render(status()).decode())
    assert seen["trioserve:e2e_request_latency_seconds_count"] == 0


async def test_all_of_ours_have_the_name_of_the_model() -> None:
    async with Server(Config(metrics_endpoint=True), load=scripted(ScriptedBackend())) as server:
        await server.complete("p", max_tokens=2)
        assert server.metrics is not None
        text = server.metrics.render(await server.status()).decode()
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("trioserve:")
    ]
    assert len(samples) > 100
    assert {sample.labels.get("model_name") for sample in samples} == {"scripted"}


async def test_what_is_kept_is_no_load() -> None:
    """A warm server that has nothing to do looks as free as a cold one."""
    backend = ScriptedBackend(lambda prompt: "x" * 10**5, n_slots=2, n_ctx=2048)
    async with Server(Config(metrics_endpoint=True), load=scripted(backend)) as server:
        assert server.metrics is not None
        async with server.stream_complete("p" * 256) as stream:
            await stream.__anext__()
            seen = read(server.metrics.render(await server.status()).decode())
            assert 256 / 2048 <= seen["trioserve:kv_cache_usage_perc"] < 1
        seen = read(server.metrics.render(await server.status()).decode())
        assert seen["trioserve:kv_cache_usage_perc"] == 0
        assert seen["trioserve:kv_cells_used"] >= 256
        blocks = 'trioserve:cache_config_info{block_size="16",num_gpu_blocks="128"}'
        assert seen[blocks] == 1


def test_the_adapters_that_run_and_wait_have_names() -> None:
    metrics = Metrics()
    metrics.adapters = ["cats", "dogs", "birds"]
    running = Task(1, Prompt((1,)), root=CacheRoot(adapters=((0, 1.0), (1, 0.5))))
    look = EngineStatus(
        slots=(slot(0, running), slot(1, None)),
        waiting=(
            WaitingStatus(
                task_id=2, position=1, n_prompt=1, priority=0, waited_s=0, adapters=((1, 1), (2, 1))
            ),
        ),
    )
    names = 'max_lora="3",running_lora_adapters="cats,dogs",waiting_lora_adapters="birds"'
    seen = read(metrics.render(look).decode())
    assert seen[f"trioserve:lora_requests_info{{{names}}}"] == pytest.approx(time.time(), abs=60)
    idle = 'max_lora="3",running_lora_adapters="",waiting_lora_adapters=""'
    assert read(metrics.render(status()).decode())[f"trioserve:lora_requests_info{{{idle}}}"] == 0


def slot(id_: int, task: Task | None) -> SlotStatus:
    return SlotStatus(
        id=id_,
        state="decode" if task else "idle",
        n_ctx=9,
        task_id=task and task.id,
        n_prompt=1,
        n_past=1,
        n_cached=0,
        n_decoded=0,
        paused=False,
        task=task,
    )


def test_each_tier_of_the_cache_has_its_own_numbers() -> None:
    names = {
        "kv_bytes": "kv_cache_bytes",
        "ram_bytes": "ram_cache_bytes",
        "disk_bytes": "disk_cache_bytes",
        "ram_tokens": "prefix_cache_ram_hits_total",
        "disk_tokens": "prefix_cache_disk_hits_total",
        "disk_read_bytes": "disk_cache_read_bytes_total",
        "disk_written_bytes": "disk_cache_written_bytes_total",
    }
    counters = {field: i for i, field in enumerate(names, 1)}
    seen = read(Metrics().render(status(**counters)).decode())
    assert {field: seen[f"trioserve:{name}"] for field, name in names.items()} == counters


async def test_without_the_flag_it_is_not_there() -> None:
    async with client_of() as client:
        answer = await client.get("/metrics")
        assert answer.status_code == 501
        assert answer.json() == {
            "error": {
                "code": 501,
                "message": "This server does not support metrics endpoint. "
                "Start it with `--metrics`",
                "type": "not_supported_error",
                "param": None,
            }
        }


async def test_over_http() -> None:
    async with (
        client_of(metrics_endpoint=True) as client,
    ):
        for _ in range(2):
            body = {"prompt": "p" * 40, "temperature": 0}
            assert (await client.post("/completion", json=body)).status_code == 200
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert int(answer.headers["Process-Start-Time-Unix"]) > 1.7e9
        assert (await client.get("/props")).json()["endpoint_metrics"] is True
    seen = read(answer.text)
    assert seen["llamacpp:prompt_tokens_total"] + seen["llamacpp:prompt_tokens_cached_total"] == 80
    assert seen["llamacpp:prompt_tokens_cached_total"] >= 32
    assert seen["llamacpp:tokens_predicted_total"] == 82  # and two ends
    assert seen["llamacpp:n_tokens_max"] == 81
    assert seen["llamacpp:n_busy_slots_per_decode"] == 1
    assert seen["llamacpp:requests_processing"] == seen["llamacpp:requests_deferred"] == 0
    assert seen["trioserve:prefix_cache_queries_total"] == 80
    assert seen["trioserve:prefix_cache_hits_total"] == seen["llamacpp:prompt_tokens_cached_total"]
    assert seen['trioserve:request_success_total{reason="eos"}'] == 2
    assert seen["trioserve:request_generation_tokens_sum"] == 82
    assert seen["trioserve:time_to_first_token_seconds_count"] == 2
    assert 40 <= seen["trioserve:kv_cells_used"] <= seen["trioserve:kv_cells"] == 1024
    assert seen["trioserve:ticks_total"] >= 82
    assert seen["trioserve:tick_seconds_total"] > 0


async def test_a_client_that_goes_away_is_counted() -> None:
    endless = ScriptedBackend(lambda prompt: "x" * 10**5, n_ctx=2**17)
    async with (
        serving_script(endless, metrics_endpoint=True) as (url, service),
        httpx.AsyncClient(base_url=url) as client,
    ):
        body = b'{"prompt": "p", "stream": true}'
        async with connected(url) as connection:
            await connection.send_all(post("/completion", body))
            assert await connection.receive_some()
        while len(service.server.lifecycle.services.dispatcher):
            await trio.lowlevel.checkpoint()
        seen = read((await client.get("/metrics")).text)
        assert seen['trioserve:request_cancelled_total{reason="disconnect"}'] == 1


async def test_who_runs_and_who_waits() -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 10**5, n_slots=1, n_ctx=2**17)
    config = Config(metrics_endpoint=True)
    async with Server(config, load=scripted(backend)) as server:
        assert server.metrics is not None
        async with server.stream_complete("a") as one, server.stream_complete("b"):
            await one.__anext__()
            seen = read(server.metrics.render(await server.status()).decode())
            assert seen["trioserve:num_requests_running"] == 1
            assert seen["trioserve:num_requests_waiting"] == 1
            assert seen["llamacpp:requests_processing"] == 1
            assert seen["llamacpp:requests_deferred"] == 1
        seen = read(server.metrics.render(await server.status()).decode())
        assert seen['trioserve:request_cancelled_total{reason="caller"}'] == 2


@LINUX
def test_memory_and_descriptors_are_those_of_this_process() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = read(metrics.render_process().decode())
    with open(os.devnull), open(os.devnull):
        after = read(metrics.render_process().decode())
    assert after["process_open_fds"] == before["process_open_fds"] + 2
    assert after["process_max_fds"] == limit
    resident = pages * os.sysconf("SC_PAGESIZE")
    assert before["process_resident_memory_bytes"] == pytest.approx(resident, rel=0.05)
    assert 0 < before["process_cpu_seconds_total"] <= after["process_cpu_seconds_total"]


@LINUX
async def test_a_server_has_those_of_its_process() -> None:
    async with client_of(metrics_endpoint=True) as client:
        seen = read((await client.get("/metrics")).text)
    assert seen["process_resident_memory_bytes"] > 2**20
    assert seen["process_start_time_seconds"] > 1.7e9
