"""Short chats, editors and embeddings: what is sent, and what counts."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from benchmarks.driver import run
from benchmarks.everyday import Editor, Embeddings, Turns
from benchmarks.plan import CANCELLED, Address, Plan, Request
from benchmarks.scenarios import Settings
from benchmarks.selfcheck import HEAD, chunk, read_request
from benchmarks.targets import Target
from benchmarks.wire import Shape
from tests.support.canned_server import serving_bytes


def event(**fields: object) -> bytes:
    return chunk(b"data: %b\n\n" % json.dumps(fields).encode())


ANSWER = (
    HEAD
    + event(choices=[{"delta": {"content": "two "}}])
    + event(choices=[{"delta": {"content": "words"}}])
    + event(choices=[], usage={"completion_tokens": 2, "prompt_tokens": 3})
    + chunk(b"data: [DONE]\n\n")
    + chunk(b"")
)


def test_each_turn_of_a_chat_sends_the_answers_before_it() -> None:
    bodies = list[dict[str, object]]()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for _ in range(3):
                bodies.append(json.loads(read_request(connection).partition(b"\r\n\r\n")[2]))
                connection.sendall(ANSWER)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        target = Target("x", Address("127.0.0.1", listener.getsockname()[1]))
        settings = Settings(shape=Shape(max_tokens=2))
        sample = Turns(settings, clients=1, turns=3).measure(target, "seed")
        thread.join(10)
    assert not sample.failed
    assert sample.numbers["tokens"] == 6
    assert "later ttft p50" in sample.numbers
    contents = [[m["content"] for m in body["messages"]] for body in bodies]  # type: ignore[attr-defined]
    assert [len(one) for one in contents] == [1, 3, 5]
    assert contents[2][:3] == contents[1]
    assert contents[2][1] == contents[2][3] == "two words"


def test_a_request_that_is_given_up_closes_its_connection() -> None:
    closed = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            connection.sendall(HEAD)
            if connection.recv(1) == b"":
                closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = Address("127.0.0.1", listener.getsockname()[1])
        given_up = Request("POST", "/completion", b"{}", cancel_after=0.01)
        result = run(address, [Plan(requests=[given_up])], timeout=60)
        thread.join(10)
    assert closed.is_set()
    assert [one.error for one in result.outcomes] == [CANCELLED]


def test_an_editor_counts_the_answers_that_it_waits_for() -> None:
    scenario = Editor(Settings(), clients=1, requests=2, max_tokens=2, cancelled=0.0)
    with serving_bytes(ANSWER, keep=2) as address:
        sample = scenario.measure(Target("x", address), "seed")
    assert (sample.requests, sample.failed) == (2, 0)
    assert sample.numbers["wall s"] > 0


@pytest.mark.parametrize("status", ["200 OK", "500 Oops"])
def test_embeddings_are_counted_by_text(status: str) -> None:
    answer = f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    with serving_bytes(answer, keep=1) as address:
        sample = Embeddings(Settings(), clients=1, texts=4).measure(Target("x", address), "seed")
    assert ("texts/s" in sample.numbers) is (status == "200 OK")
    assert sample.failed == (status != "200 OK")
