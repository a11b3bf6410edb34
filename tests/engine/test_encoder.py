"""The encoder: whose turn it is, what is kept, and how its thread ends."""

from __future__ import annotations

import threading

import pytest

from trioserve.engine import encoder as encoder_module
from trioserve.engine.encoder import Encoded, MediaEncoder
from trioserve.testing import ScriptedProjector
from trioserve.types import MediaChunk

SIZE = 5 * 4 * 4  # bytes of the embeddings of a chunk


class Bench:
    """An encoder whose steps are called by hand."""

    def __init__(self) -> None:
        self.projector = ScriptedProjector()
        self.done: list[Encoded] = []
        self.encoder = MediaEncoder(self.projector, self.done.append)
        self.encoder.has_thread = False

    def want(self, **names: str) -> None:
        """Wish for chunks with names of one letter, for runs with names like ``r1``."""
        wishes = {int(run[1:]): [self.chunk(name) for name in its] for run, its in names.items()}
        self.encoder.want(wishes)

    def chunk(self, name: str) -> MediaChunk:
        return self.projector.chunk("image", name)

    def encode(self) -> str:
        """Encode all that can be; returns the names."""
        before = len(self.projector.encoded)
        while self.encoder.encode_next():
            pass
        return "".join(self.projector.encoded[before:])

    def has(self, name: str) -> bool:
        return self.encoder.get(self.chunk(name)) is not None


def test_runs_take_turns() -> None:
    bench = Bench()
    bench.want(r1="abcd", r2="wx", r3="az")
    assert bench.encode() == "awzbxcd"
    assert not bench.encoder.is_busy


def test_a_run_looks_ahead_as_far_as_there_is_room() -> None:
    bench = Bench()
    bench.encoder.limit = 2 * SIZE
    bench.want(r1="abcd")
    assert bench.encode() == "ab"
    bench.want(r1="bcd")  # a was decoded
    assert bench.encode() == "c"
    assert not bench.has("a")


def test_embeddings_that_requests_need_next_are_always_kept() -> None:
    bench = Bench()
    bench.encoder.limit = 0
    bench.want(r1="ab", r2="c")
    assert bench.encode() == "ac"
    assert bench.has("a") and bench.has("c")
    bench.want(r1="b")
    assert not bench.has("a") and not bench.has("c")
    assert bench.encode() == "b"
    bench.want()
    assert not bench.has("b")


def test_an_encoding_with_too_many_threads_begins_again() -> None:
    bench = Bench()
    bench.encoder.set_threads(4)
    bench.want(r1="a")
    bench.projector.on_encode = lambda _chunk: bench.encoder.set_threads(2)
    assert bench.encode() == "a"
    assert bench.projector.n_interrupted == 1
    assert bench.projector.threads == [4, 2]


def test_an_encoding_begins_again_if_more_threads_end_it_sooner() -> None:
    bench = Bench()
    bench.encoder.set_threads(1)
    bench.want(r1="a")
    bench.encoder._work_per_cell = 100.0
    bench.projector.on_encode = lambda _chunk: bench.encoder.set_threads(4)
    assert bench.encode() == "a"
    assert bench.projector.n_interrupted == 1
    assert bench.encoder._work_per_cell < 1  # it has learned
    bench.encoder.set_threads(1)
    bench.encoder._work_per_cell = 0.0
    bench.want(r1="b")
    assert bench.encode() == "b"
    assert bench.projector.n_interrupted == 1


@pytest.mark.parametrize(("elapsed", "n_interrupted"), [(24.0, 1), (25.0, 0), (40.0, 0)])
def test_an_encoding_that_is_half_done_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, n_interrupted: int
) -> None:
    times = iter([0.0, elapsed, elapsed, elapsed])
    monkeypatch.setattr(encoder_module, "monotonic", lambda: next(times))
    bench = Bench()
    bench.encoder.set_threads(2)
    bench.want(r1="a")
    bench.encoder._work_per_cell = 100.0 / bench.chunk("a").n_cells  # 50 s, or 25 s with four
    bench.projector.on_encode = lambda _chunk: bench.encoder.set_threads(4)
    bench.encoder.encode_next()
    assert bench.projector.n_interrupted == n_interrupted


def test_the_thread_encodes_what_is_wanted_and_is_ended_while_it_does() -> None:
    projector = ScriptedProjector()
    arrived = threading.Event()
    done: list[str] = []

    def note(one: Encoded) -> None:
        done.append(one.chunk.id)
        arrived.set()

    encoder = MediaEncoder(projector, note)
    encoder.start()
    encoder.want({1: [projector.chunk("image", "a")]})
    assert arrived.wait(10)
    assert done == ["a"]
    begun = threading.Event()
    projector.on_encode = lambda _chunk: begun.set()
    projector.gate.clear()
    encoder.want({1: [projector.chunk("image", "b")]})
    assert begun.wait(10)
    encoder.close()
    assert done == ["a"] and projector.n_interrupted == 1
    assert not any(thread.name == "encoder" for thread in threading.enumerate())


def test_it_is_busy_from_a_wish_to_the_end_of_its_encoding() -> None:
    bench, seen = Bench(), []
    assert not bench.encoder.is_busy
    bench.want(r1="a")
    assert bench.encoder.is_busy

    def leave(_chunk: MediaChunk) -> None:
        bench.want()
        seen.append(bench.encoder.is_busy)

    bench.projector.on_encode = leave
    assert bench.encode() == "" and seen == [True]
    assert not bench.encoder.is_busy
