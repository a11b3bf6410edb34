"""The engine, stepping by hand on the scripted backend."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import pytest
import trio

from tests.support.engine_events import take_events
from tests.support.engine_harness import Harness
from tests.support.waiting import until
from trioserve.engine import AnswersFirst, DecodeMaximal, Engine, loop
from trioserve.engine.cache import prefix_cache
from trioserve.errors import (
    DecodeError,
    EngineError,
    KVCacheFullError,
)
from trioserve.testing import ScriptedBackend
from trioserve.testing.vocab import EOS
from trioserve.types import (
    AdapterInfo,
    Adapters,
    CacheRoot,
    Chunk,
    Failed,
    Finished,
    FinishReason,
    GenerationParams,
    Progress,
    Prompt,
    Task,
)


def test_one_task_from_prompt_to_end() -> None:
    harness = Harness()
    harness.complete(1, "hello")
    assert harness.text(1) == "HELLO"
    finished = harness.finish(1)
    assert finished.reason is FinishReason.EOS
    assert (finished.timings.prompt_n, finished.timings.cache_n) == (5, 0)
    assert finished.timings.predicted_n == 6  # the end token counts
    assert harness.backend.n_samplers == 0
    assert harness.states() == ["idle", "idle"]


def test_the_bell_rings_once_a_step() -> None:
    harness = Harness(ScriptedBackend(n_slots=4))
    for task_id in range(1, 5):
        harness.submit(task_id, "hello")
    harness.run()
    assert harness.rings == harness.engine.status().counters.steps


@pytest.mark.parametrize("split", [False, True])
def test_more_chats_than_slots_prefill_only_new_tokens(split: bool) -> None:
    backend = ScriptedBackend(
        n_slots=3, n_ctx=1200, n_ctx_seq=400 if split else 1200, n_seqs=3 if split else 6
    )
    harness = Harness(backend, cache_ram=2**20)
    chats = [f"what all of them begin with, which is their system prompt. {i}" for i in range(8)]
    task_ids, n_prefilled, n_new = itertools.count(), 0, sum(map(len, chats)) - 7 * len(chats[0])
    for turn in range(3):
        running = {}
        for i in (3, 1, 4, 0, 5, 7, 2, 6):
            said = f"{i} says that this is turn {turn}, and what has to be said of it."
            chats[i], n_new = chats[i] + said, n_new + len(said)
            running[task_id := next(task_ids)] = i
            harness.submit(task_id, chats[i], max_tokens=4)
        harness.run()
        for task_id, i in running.items():
            n_prefilled += harness.finish(task_id).timings.prompt_n
            chats[i] += harness.text(task_id)
    assert n_prefilled < 1.1 * n_new


def test_a_split_cache_gets_the_sequences_of_a_batch_in_order() -> None:
    harness = Harness(ScriptedBackend(n_slots=4, n_ctx=400, n_ctx_seq=100))
    orders = []

    def note(backend: ScriptedBackend) -> None:
        orders.append([seq for _, _, seq, _ in backend.batch.rows])

    harness.backend.on_decode = note
    # A slot continues the sequence that fits, which need not have the slot's number.
    for task_id, prompt in enumerate(("abcd" * 9, "bcda" * 9, "cdab" * 9, "dabc" * 9) * 2):
        harness.submit(task_id, prompt if task_id < 4 else prompt[::-1][:9] + prompt)
    harness.run()
    for task_id in (14, 13, 11, 12):
        harness.submit(task_id, ("abcd", "bcda", "cdab", "dabc")[task_id - 11] * 9)
        harness.step()
    harness.run()
    assert max(len(set(order)) for order in orders) == 4
    assert all(order == sorted(order) for order in orders)


@pytest.mark.parametrize(
    ("n_streams", "step_ms", "sizes"),
    [
        (8, 10, [1, 1, 3, 3, 3, 1]),  # the second is sent with the first ones of the others
        (8, 16, [1, 1, 2, 2, 2, 2, 2]),
        (8, 20, [1] * 12),
        (8, 50, [1] * 12),
        (4, 6, [1, 3, 3, 3, 2]),
        (2, 4, [1, 2, 2, 2, 2, 2, 1]),
        (1, 2, [1, 2, 2, 2, 2, 2, 1]),
        (1, 3, [1] * 12),
    ],
)
def test_tokens_leave_together_where_there_are_many_streams(
    n_streams: int, step_ms: int, sizes: list[int]
) -> None:
    harness = Harness(ScriptedBackend(n_slots=8))
    harness.engine.flush_interval = 0.033
    harness.engine.clock = lambda: harness.backend.n_decodes * step_ms / 1e3
    for number in range(n_streams):
        harness.submit(number, "twelve bytes", max_tokens=12)
    together = []
    work_left = True
    while work_left:
        before = len(harness.text(0))
        work_left = harness.step()
        together.append(len(harness.text(0)) - before)
    assert [n for n in together if n] == sizes


def test_tokens_wait_for_an_event_loop_that_is_busy() -> None:
    harness = Harness()
    harness.engine.flush_interval = 0.033
    engine, rings = harness.engine, list[int]()
    engine.clock = lambda: harness.backend.n_decodes * 10 / 1e3
    harness.submit(1, "twelve bytes", max_tokens=12)
    while engine.step():  # the loop takes nothing meanwhile
        rings.append(harness.rings)
    assert rings == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]


def test_a_long_prompt_does_not_stop_a_stream() -> None:
    harness = Harness(ScriptedBackend(n_batch=256), max_tick_ms=0.001)
    harness.submit(1, "a stream of many bytes, " * 5)
    harness.step()
    harness.submit(2, "x" * 200, max_tokens=1)
    while not harness.events[2]:
        before = len(harness.text(1))
        harness.step()
        assert len(harness.text(1)) == before + 1
    assert harness.backend.n_decodes > 200 // 64  # in small parts, though one batch holds it


@pytest.mark.parametrize("steps", [0, 1, 2, 5], ids=["queued", "prefill", "prefill", "decode"])
def test_a_cancelled_task_is_gone_by_the_next_step(steps: int) -> None:
    harness = Harness(ScriptedBackend(n_slots=1, n_batch=8))
    if steps == 0:
        harness.submit(9, "in the only slot", max_tokens=1)
        harness.step()
    harness.submit(1, "somewhat longer than a batch")
    for _ in range(steps):
        harness.step()
    harness.engine.cancel(1)
    harness.engine.cancel(1)
    harness.step()
    harness.run()
    assert harness.engine.status().waiting == ()
    assert harness.states() == ["idle"]
    assert not any(isinstance(event, Finished | Failed) for event in harness.events[1])
    assert harness.backend.n_samplers == 0


def test_stop_strings_and_limits() -> None:
    harness = Harness()
    harness.submit(1, "one, two", stop=(", T",))
    harness.submit(2, "one, two", max_tokens=3)
    harness.complete(3, "one, two", max_tokens=0)
    assert (harness.text(1), harness.finish(1).stopping_word) == ("ONE", ", T")
    assert harness.finish(1).reason is FinishReason.WORD
    assert (harness.text(2), harness.finish(2).reason) == ("ONE", FinishReason.LIMIT)
    assert (harness.text(3), harness.finish(3).reason) == ("", FinishReason.LIMIT)
    assert harness.finish(3).timings.predicted_n == 0


def test_the_tokens_of_held_back_text_come_with_it() -> None:
    harness = Harness(ScriptedBackend(lambda prompt: "a€b"))
    harness.complete(1, "x", n_probs=1)
    chunks = [event for event in harness.events[1] if isinstance(event, Chunk)]
    assert [(chunk.text, len(chunk.tokens)) for chunk in chunks] == [
        ("a", 1),
        ("€", 3),
        ("b", 1),
        ("", 1),
    ]
    assert all(len(chunk.probs) == len(chunk.tokens) for chunk in chunks)


def test_a_full_context_ends_the_output() -> None:
    harness = Harness(ScriptedBackend(lambda prompt: "x" * 100, n_ctx=16, n_batch=16))
    harness.complete(1, "12345678")
    assert harness.text(1) == "x" * 8
    assert harness.finish(1).reason is FinishReason.LIMIT
    assert harness.finish(1).truncated


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_full_context_can_go_on_without_its_older_half(can_cut: bool) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 1000, n_ctx=32, n_batch=16, can_cut=can_cut)
    harness = Harness(backend, context_shift=True)
    harness.submit(1, "12345678", max_tokens=100, n_keep=4)
    while harness.step():
        assert bytes(backend.sequences[0][:4]) in (b"1234", b"")
    assert harness.text(1) == "x" * 100
    assert harness.finish(1).truncated
    assert harness.finish(1).timings.predicted_n == 100
    assert harness.finish(1).timings.prompt_n == 8


def test_an_unlimited_output_has_an_end() -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 1000, n_ctx=32, n_batch=16)
    harness = Harness(backend, context_shift=True)
    harness.complete(1, "12345678")
    assert harness.text(1) == "x" * 32
    assert harness.finish(1).reason is FinishReason.LIMIT


@pytest.mark.parametrize(("n_discard", "n_left"), [(0, 18), (3, 29), (10, 22)])
def test_how_much_of_a_full_context_goes(n_discard: int, n_left: int) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 1000, n_ctx=32, n_batch=32)
    harness = Harness(backend, context_shift=True)
    harness.submit(1, "12345678", max_tokens=40, n_keep=4, n_discard=n_discard)
    lengths = []
    while harness.step():
        lengths.append(len(backend.sequences[0]))
    after = [b for a, b in itertools.pairwise(lengths) if a == 4]  # what is kept of the prompt
    assert after[0] == n_left
    assert harness.text(1) == "x" * 40


def test_the_time_limit_ends_at_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100_000))
    monkeypatch.setattr("trioserve.engine.output.monotonic", lambda: next(now))
    harness = Harness(ScriptedBackend(lambda prompt: "a\nb\nc\nd\n"))
    harness.submit(1, "x", t_max_predict_ms=2500)  # the clock steps once a token, in seconds
    harness.run()
    assert harness.text(1) == "a\nb\n"
    assert harness.finish(1).reason is FinishReason.LIMIT


def test_a_line_that_is_not_indented_ends_the_output() -> None:
    harness = Harness(ScriptedBackend(lambda prompt: "x\n    y\n  E z END"))
    harness.complete(1, "x", n_indent=4, stop=("END",))
    assert harness.text(1) == "x\n    y\n  "
    assert harness.finish(1).reason is FinishReason.LIMIT
    assert harness.finish(1).stopping_word == ""


class SixteenTokens:
    """A strategy that gives the oldest prompt 16 tokens a step, whatever they cost."""

    pace = 0.0

    def begin(self, *, unified: bool) -> None:
        """Learn nothing."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        return [min(16, pending[0], budget), *[0] * (len(pending) - 1)]

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn nothing."""


def test_progress_is_counted_in_batches_however_small_the_steps() -> None:
    harness = Harness(ScriptedBackend(n_batch=64))
    harness.engine = Engine(harness.backend, SixteenTokens(), lambda: None)
    harness.complete(1, "x" * 150, return_progress=True, max_tokens=1)
    progress = [event for event in harness.events[1] if isinstance(event, Progress)]
    assert [event.processed for event in progress] == [0, 64, 128, 150]
    assert progress[0].time_ms == 0 and progress[0].total == 150


def test_without_continuous_batching_prompts_wait_for_answers() -> None:
    harness = Harness()
    harness.engine = Engine(harness.backend, AnswersFirst(DecodeMaximal()), lambda: None)
    harness.submit(1, "abc")
    harness.step()
    harness.submit(2, "xy")
    assert harness.states() == ["decode", "idle"]
    while not harness.text(2):
        assert harness.step()
    assert isinstance(harness.events[1][-1], Finished)
    harness.run()
    assert (harness.text(1), harness.text(2)) == ("ABC", "XY")


def test_a_paused_task_keeps_its_slot_and_waits() -> None:
    harness = Harness(ScriptedBackend(n_slots=1))
    harness.submit(1, "hello")
    harness.step()
    harness.engine.pause(1)
    assert not harness.step()
    assert harness.states() == ["decode"]
    assert harness.text(1) == "H"
    harness.engine.resume(1)
    harness.run()
    assert harness.text(1) == "HELLO"


def test_a_paused_task_gives_its_slot_to_one_that_waits() -> None:
    harness = Harness(ScriptedBackend(n_slots=1, n_seqs=2))
    harness.submit(1, "hello")
    harness.step()
    harness.engine.pause(1)
    harness.complete(2, "you")
    assert harness.text(2) == "YOU"
    assert harness.states() == ["idle"]
    assert [run.task_id for run in harness.engine.status().waiting] == [1]
    n_tokens = harness.engine.status().counters.prompt_tokens
    harness.engine.resume(1)
    harness.run()
    assert harness.text(1) == "HELLO"
    assert harness.admitted == [1, 2, 1]
    assert harness.engine.status().counters.prompt_tokens == n_tokens + 1, "it was computed again"


def test_a_task_that_asks_for_a_slot_gets_it_from_a_paused_one() -> None:
    harness = Harness(ScriptedBackend(n_slots=2))
    for task_id in (1, 2):
        harness.submit(task_id, "hello")
    harness.step()
    harness.engine.pause(1)
    harness.submit(3, "you", id_slot=0)
    harness.submit(4, "me", id_slot=1)
    harness.step()
    assert [slot.task_id for slot in harness.engine.status().slots] == [3, 2]
    harness.engine.cancel(1)
    harness.run()
    assert harness.text(4) == "ME"
    assert harness.text(1) == "H"


def held(harness: Harness) -> list[int]:
    return sorted(len(seq) for seq in harness.backend.sequences if seq)


def test_a_request_that_starts_sends_one_to_ram() -> None:
    backend = ScriptedBackend(n_slots=1, n_seqs=9, n_ctx=1000)
    harness = Harness(backend, cache_ram=2**20)
    for task_id, letter in enumerate("abcdef", 1):
        harness.complete(task_id, letter * 40, max_tokens=1)
    assert held(harness) == [40] * 6
    harness.engine._scheduler.cache.max_idle = 0
    for task_id in (7, 8):
        harness.complete(task_id, str(task_id) * 40, max_tokens=1)
        assert held(harness) == [40] * 6


@pytest.mark.parametrize("why", ["no RAM", "split", "in one piece"])
def test_idle_sequences_stay_if_ram_cannot_take_them(why: str) -> None:
    backend = ScriptedBackend(
        n_slots=1,
        n_seqs=9,
        n_ctx=1000,
        n_ctx_seq=100 if why == "split" else 1000,
        can_cut=why != "in one piece",
    )
    harness = Harness(backend, cache_ram=0 if why == "no RAM" else 2**20, max_idle=50)
    for task_id, letter in enumerate("abcd", 1):
        harness.complete(task_id, letter * 40, max_tokens=1)
    assert held(harness) == [40] * 4


def test_when_runs_outgrow_the_cache_the_youngest_waits_and_goes_on() -> None:
    harness = Harness(ScriptedBackend(n_slots=2, n_ctx=48, n_batch=48))
    harness.submit(1, "a" * 16)
    harness.submit(2, "b" * 16)
    seen_waiting = False
    while harness.step():
        waiting = [task.task_id for task in harness.engine.status().waiting]
        seen_waiting = seen_waiting or waiting == [2]
    assert seen_waiting
    assert (harness.text(1), harness.text(2)) == ("A" * 16, "B" * 16)
    assert harness.finish(2).timings.predicted_n == 17


def test_a_cache_that_has_room_for_one_only_computes_one_after_the_other() -> None:
    """The ledger counts room for all; only the backend knows better."""
    harness = Harness()

    def refuse(backend: ScriptedBackend) -> None:
        if len({seq for _, _, seq, _ in backend.batch.rows}) > 1:
            backend.fail_next = KVCacheFullError("full")

    harness.backend.on_decode = refuse
    for task_id in range(1, 4):
        harness.submit(task_id, f"task {task_id}")
    harness.run(200)
    assert [harness.text(task_id) for task_id in range(1, 4)] == ["TASK 1", "TASK 2", "TASK 3"]


def test_a_task_that_fills_the_cache_alone_fails() -> None:
    harness = Harness()
    harness.submit(1, "one")
    harness.backend.fail_next = KVCacheFullError("full")
    harness.run()
    assert isinstance(harness.events[1][-1], Failed)


def test_a_failed_decode_fails_its_batch_and_nothing_else() -> None:
    harness = Harness(ScriptedBackend(n_slots=1))
    harness.submit(1, "one")
    harness.submit(2, "two")
    harness.backend.fail_next = DecodeError("bad luck")
    harness.run()
    assert isinstance(harness.events[1][-1], Failed)
    assert harness.text(2) == "TWO"
    assert harness.backend.n_samplers == 0


def test_adapters_that_are_refused_fail_their_runs_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = ScriptedBackend(adapters=[AdapterInfo(path="0"), AdapterInfo(path="1")])
    take = backend.set_adapters

    def refuse(adapters: Adapters) -> None:
        if adapters == ((1, 1.0),):
            raise DecodeError("refused")
        take(adapters)

    monkeypatch.setattr(backend, "set_adapters", refuse)
    harness = Harness(backend)
    harness.submit(1, "one", CacheRoot(((0, 1.0),)))
    harness.complete(2, "two", CacheRoot(((1, 1.0),)))
    harness.complete(3, "three", CacheRoot(((0, 1.0),)))
    assert isinstance(harness.events[2][-1], Failed)
    assert (harness.text(1), harness.text(3)) == ("<0:1>ONE", "<0:1>THREE")


def test_a_broken_engine_fails_everything_from_then_on() -> None:
    def explode(backend: ScriptedBackend) -> None:
        raise RuntimeError("boom")

    harness = Harness(ScriptedBackend(n_slots=1))
    harness.submit(1, "one")
    harness.submit(2, "two")
    harness.backend.on_decode = explode
    harness.engine.step()
    failed = {event.task_id: event for event in take_events(harness.engine)}
    assert all(isinstance(failed[i], Failed) for i in (1, 2))
    with pytest.raises(EngineError, match="engine failed") as caught:
        harness.submit(3, "three")
    assert str(caught.value.__cause__) == "boom"


def test_an_error_while_a_broken_engine_ends_its_tasks_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    harness = Harness()
    harness.submit(1, "one")
    harness.backend.on_decode = explode
    monkeypatch.setattr(harness.engine, "_fail_all", explode)
    harness.engine.step()
    with pytest.raises(EngineError) as caught:
        harness.engine.check_works()
    cause = caught.value.__cause__
    assert cause is not None
    assert cause.__notes__ == ["Its tasks could not be ended: RuntimeError('boom')."]


@pytest.mark.parametrize("special", [True, False])
def test_the_last_token_has_its_name_where_control_tokens_are_shown(special: bool) -> None:
    harness = Harness()
    task = Task(1, Prompt(b"abc"), GenerationParams(), preserved_tokens=frozenset({EOS}),
                special=special)  # fmt: skip
    harness.engine.submit(task)
    harness.run()
    assert harness.text(1) == ("ABC<eos>" if special else "ABC")
    assert harness.finish(1).reason is FinishReason.EOS


def test_an_idle_engine_copies_kept_sequences_to_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_S", 0.0)
    harness = Harness(ScriptedBackend(n_slots=4), cache_ram=2**20)
    for task_id in (1, 2):
        harness.submit(task_id, f"{task_id}" * 40, max_tokens=4)
    harness.run()
    ram = harness.engine._cache.ram
    assert len(ram) == 0
    harness.submit(3, "3" * 4, max_tokens=1)
    harness.engine.step(wait=True)
    assert len(ram) == 0, "a request comes first"
    for n_in_ram in (1, 2, 2):
        harness.engine.step(wait=True)
        assert len(ram) == n_in_ram
    harness.complete(4, "1" * 41, max_tokens=1)
    harness.engine.check_integrity()


def test_large_states_are_copied_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_S", 0.0)
    monkeypatch.setattr(prefix_cache, "MAX_SOON", 10)
    harness = Harness(ScriptedBackend(n_slots=4), cache_ram=2**20)
    harness.complete(1, "1" * 40, max_tokens=4)
    ram = harness.engine._cache.ram
    for n_in_ram in (0, 1):
        harness.engine.step(wait=True)
        assert len(ram) == n_in_ram


async def test_an_idle_engine_waits_for_tasks_that_arrive_together() -> None:
    """Meanwhile, it copies what they will evict."""
    harness = Harness(ScriptedBackend(n_slots=2), cache_ram=2**20)
    engine = harness.engine
    for task_id in (1, 2):
        harness.submit(task_id, f"{task_id}" * 40, max_tokens=1)
    harness.run()
    before = engine.status().counters.decodes
    engine.inbox.gather_s = 60.0
    harness.submit(3, "3" * 40, max_tokens=1)
    thread = threading.Thread(target=engine.step, kwargs={"wait": True})
    thread.start()
    await until(lambda: len(engine._cache.ram) == 2)
    harness.submit(4, "4" * 40, max_tokens=1)
    engine.inbox.settle()
    await trio.to_thread.run_sync(thread.join)
    assert engine.status().counters.decodes == before + 1
    harness.run()
    assert harness.text(3) == "3" and harness.text(4) == "4"
