"""The load generator against servers that send known bytes, and the maker of models."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading

import attrs
import pytest
from hypothesis import given, strategies as st

from benchmarks import load, report
from benchmarks.driver import run
from benchmarks.http1 import ProtocolError, ResponseReader, payloads
from benchmarks.plan import UNFINISHED, Address, Plan, Request
from benchmarks.selfcheck import HEAD, chunk, event, measure, read_request
from benchmarks.stats import Metric, Sample, ratio, sample_of
from benchmarks.targets import TargetError, target_of
from benchmarks.wire import Shape, understand
from tests.support.canned_server import serving_bytes
from trioserve.bench.stats import percentile

USAGE = {"completion_tokens": 5, "prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
#: Three events with output (one of them two tokens, as far as the usage says), and three without.
CHAT = [
    event(""),
    b": ping\n\n",
    event("a"),
    event("bc"),
    event("d"),
    event("", choices=[], usage=USAGE),
    b"data: [DONE]\n\n",
]
STREAM = HEAD + b"".join(map(chunk, CHAT)) + chunk(b"")
CLOSED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
REFUSED = json.dumps({"error": {"code": 400, "message": "no such field"}}).encode()


def feed(data: bytes, cuts: list[int]) -> ResponseReader:
    """Feed a reader piece by piece; the time is the number of the piece."""
    reader = ResponseReader()
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    for number, (start, end) in enumerate(itertools.pairwise(places)):
        if start < end:
            reader.feed(data[start:end], float(number))
    return reader


@given(st.lists(st.integers(0, 10_000), max_size=20), st.booleans())
def test_events_are_counted_however_the_bytes_are_cut(cuts: list[int], crlf: bool) -> None:
    events = [e.replace(b"\n", b"\r\n") for e in CHAT] if crlf else CHAT
    for data in (HEAD + b"".join(map(chunk, events)) + chunk(b""), CLOSED + b"".join(events)):
        reader = feed(data, cuts)
        assert reader.done or reader.close()
        assert reader.status == 200
        assert len(reader.times) == len(payloads(reader.body)) == 6
        assert reader.times == sorted(reader.times)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        HEAD + b"xyz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseReader().feed(data, 0.0)


def test_a_chat_stream_is_understood() -> None:
    with serving_bytes(STREAM) as address:
        result = run(address, [Plan(requests=[Shape(max_tokens=5).request("hello")])], timeout=60)
    stream = understand(result.outcomes[0])
    assert stream.error == ""
    assert (len(stream.at), len(stream.gaps)) == (3, 2)
    assert (stream.tokens, stream.prompt_tokens, stream.cached) == (5, 7, 2)
    sample = sample_of(result, planned=1, expected_tokens=6)
    assert sample.numbers["tokens"] == 5
    assert sample.notes == ("1 outputs are shorter than 6 tokens",)


def test_connections_are_kept_and_remade() -> None:
    plan = Plan(requests=[Shape().request("hello")] * 4)
    with serving_bytes(STREAM, STREAM, keep=2) as address:
        result = run(address, [plan], timeout=60)
    assert [understand(outcome).error for outcome in result.outcomes] == [""] * 4
    with serving_bytes(STREAM, STREAM, STREAM, STREAM) as address:
        result = run(address, [plan], keep_alive=False, timeout=60)
    assert [understand(outcome).error for outcome in result.outcomes] == [""] * 4


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HEAD + chunk(event("a")), "ended before the response"),
        (HEAD + chunk(event("a")) + chunk(b""), "without its last event"),
        (HEAD + chunk(b'data: {"error": {"message": "no room"}}\n\n') + chunk(b""), "no room"),
        (
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(REFUSED) + REFUSED,
            "HTTP 400: no such field",
        ),
    ],
)
def test_a_bad_answer_is_a_failure_that_says_why(answer: bytes, error: str) -> None:
    with serving_bytes(answer) as address:
        result = run(address, [Plan(requests=[Shape().request("hello")])], timeout=60)
    sample = sample_of(result, planned=1)
    assert sample.failed == 1
    assert error in sample.errors[0]


def test_late_and_background_plans() -> None:
    """One stream starts after the first has brought events; a probe runs until both are done."""

    def accept() -> tuple[socket.socket, bytes]:
        connection, _ = listener.accept()
        return connection, read_request(connection)

    def serve() -> None:
        with contextlib.ExitStack() as waiting:
            first, second = waiting.enter_context(accept()[0]), None
            first.sendall(HEAD + b"".join(map(chunk, CHAT[:4])))
            probed = False
            while second is None or not probed:
                connection, request = accept()
                waiting.enter_context(connection)
                if request.startswith(b"GET"):
                    probed = True
                else:
                    second = connection
            second.sendall(STREAM)
            first.sendall(b"".join(map(chunk, CHAT[4:])) + chunk(b""))
            assert first.recv(1) == b""  # open until the run ends

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        request = Shape().request("hello")
        result = run(
            Address("127.0.0.1", listener.getsockname()[1]),
            [
                Plan(requests=[request]),
                Plan(requests=[request], after_events=3),
                Plan(requests=[Request("GET", "/health")], background=True, delay=0.001),
            ],
            timeout=60,
        )
        thread.join(10)
    by_client = {outcome.client: outcome for outcome in result.outcomes}
    assert sorted(by_client) == [0, 1, 2]
    assert by_client[1].sent >= by_client[0].times[2]
    assert by_client[2].error == UNFINISHED


def test_the_generator_loses_no_event() -> None:
    result = measure(clients=5, events=40, step=0.0)
    assert result.events == 5 * 42
    assert sample_of(result, planned=5, expected_tokens=40).failed == 0


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:1", "127.0.0.1:80", "http://192.0.2.1:80", "http://", "http://h:x"]
)
def test_other_machines_and_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(TargetError):
        target_of(url)


def test_targets() -> None:
    assert target_of("http://127.0.0.1:81/v1").address == Address("127.0.0.1", 81)
    assert target_of("http://[::1]:81/x/").address == Address("::1", 81, "/x")
    remote = target_of("http://192.0.2.1:80", allow_remote=True)
    assert remote.address.authority == "192.0.2.1:80"


def test_ratios_are_of_medians() -> None:
    mine = [Sample(numbers={"n": value}) for value in (2.0, 4.0, 9.0)]
    base = [Sample(numbers={"n": value}) for value in (1.0, 2.0, 3.0)]
    found = ratio(mine, base, "n")
    assert found is not None
    assert (found.median, found.low, found.high) == (2.0, 2.0, 3.0)
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    table = report.table("title", [Metric("n", "ms"), Metric("m", "")], {"a": mine, "b": base})
    assert "4.0 [2.0, 9.0]  2.0 [1.0, 3.0]  2.000 [2.000, 3.000]" in table


def test_two_servers_are_measured_in_turn() -> None:
    lines: list[str] = []
    one_load = load.Load(clients=1, shape=Shape(max_tokens=5), keep_alive=False)
    with serving_bytes(*[STREAM] * 2) as one, serving_bytes(*[STREAM] * 2) as two:
        targets = [target_of(f"http://{address.authority}") for address in (one, two)]
        samples = load.interleave(targets, 2, one_load.measure, "1 client", lines.append)
    names = [target.name for target in targets]
    assert {name: len(found) for name, found in samples.items()} == dict.fromkeys(names, 2)
    assert [line.split()[-1] for line in lines] == [*names, *reversed(names)]
    assert all(sample.failed == 0 for found in samples.values() for sample in found)


def test_impossible_shapes_are_refused() -> None:
    pytest.importorskip("gguf")
    from benchmarks import gguf_maker

    for change in (
        {"faint_layers": 2},
        {"bits": 4},
        {"vocab": 100},
        {"width": 65},
        {"heads": 3},
        {"layers": 0},
        {"ffn": 100},
    ):
        with pytest.raises(ValueError, match="must be"):
            attrs.evolve(gguf_maker.PRESETS["tiny"], **change)
