"""The load generator against servers that send known bytes."""

from __future__ import annotations

import itertools
import json
import socket
import threading

import pytest
from hypothesis import given, strategies as st

from benchmarks.cancel import cut
from benchmarks.driver import Address, Outcome, Plan, Request, run
from benchmarks.http1 import ProtocolError, ResponseReader, payloads
from benchmarks.stats import sample_of
from benchmarks.wire import Shape, answer_of, understand
from tests.support.canned_server import read_request, serving_bytes

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(content: str, **more: object) -> bytes:
    choices = [{"finish_reason": None, "index": 0, "delta": {"content": content}}]
    return b"data: %b\n\n" % json.dumps({"choices": choices, "id": "x", **more}).encode()


def native(content: str, **more: object) -> bytes:
    """One event of ``/completion``."""
    return b"data: %b\n\n" % json.dumps({"content": content, **more}).encode()


USAGE = {"completion_tokens": 5, "prompt_tokens": 7}
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
LAST = native("", stop=True, tokens_predicted=2, tokens_evaluated=3, timings={"prompt_n": 3})
NATIVE = HEAD + b"".join(
    chunk(data) for data in (native("a", tokens=[1]), native("b", tokens=[2]), LAST, b"")
)


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
def test_bytes_of_other_protocols_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseReader().feed(data, 0.0)


def test_a_chat_stream_is_understood() -> None:
    with serving_bytes(STREAM) as address:
        result = run(address, [Plan(requests=[Shape(max_tokens=5).request("hello")])], timeout=60)
    stream = understand(result.outcomes[0])
    assert stream.error == ""
    assert (len(stream.at), len(stream.gaps)) == (3, 2)
    assert (stream.tokens, stream.prompt_tokens) == (5, 7)
    sample = sample_of(result, planned=1, expected_tokens=6)
    assert sample.numbers["tokens"] == 5
    assert sample.notes == ("1 outputs are shorter than 6 tokens",)


def test_connections_are_kept_and_remade() -> None:
    plan = Plan(requests=[Shape().request("hello")] * 4)
    with serving_bytes(STREAM, STREAM, keep=2) as address:
        result = run(address, [plan], timeout=60)
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


def test_a_plan_continues_with_the_answer() -> None:
    answers: list[tuple[str, list[int]]] = []

    def then(found: Outcome) -> Request | None:
        answers.append(answer_of(found))
        return shape.request("more") if len(answers) < 3 else None

    shape = Shape(api="completion")
    with serving_bytes(NATIVE, keep=3) as address:
        result = run(address, [Plan(requests=[shape.request("x")], then=then)], timeout=60)
    assert len(result.outcomes) == 3
    assert answers == [("ab", [1, 2])] * 3


def test_a_late_plan_begins_after_events_of_the_others() -> None:
    def serve() -> None:
        first, _ = listener.accept()
        with first:
            read_request(first)
            first.sendall(HEAD + b"".join(map(chunk, CHAT[:4])))
            second, _ = listener.accept()
            with second:
                read_request(second)
                second.sendall(STREAM)
                first.sendall(b"".join(map(chunk, CHAT[4:])) + chunk(b""))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = Address("127.0.0.1", listener.getsockname()[1])
        request = Shape().request("hello")
        plans = [Plan(requests=[request]), Plan(requests=[request], after_events=3)]
        result = run(address, plans, timeout=60)
        thread.join(10)
    first, late = sorted(result.outcomes, key=lambda outcome: outcome.client)
    assert (first.error, late.error) == ("", "")
    assert late.sent >= first.times[2]


def test_a_request_is_cut_off_while_it_decodes() -> None:
    closed = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            connection.sendall(HEAD + chunk(native("a")) + chunk(native("b")))
            if connection.recv(1) == b"":
                closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = Address("127.0.0.1", listener.getsockname()[1])
        assert cut(address, Shape(api="completion").request("x"), 10.0, 2, 10.0) is not None
        thread.join(10)
    assert closed.is_set()
