"""Random arrivals, cancels, pauses and drafts: the invariants hold after every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.engine_events import take_events
from tests.support.engine_harness import Harness
from tests.support.step_costs import FlatCosts
from trioserve.engine import DecodeMaximal, DraftRequest, Engine
from trioserve.engine.cache.prefix_cache import CheckpointRules
from trioserve.engine.drafts.ngrams import NgramDrafter, NgramRules
from trioserve.engine.planner import AdapterTurns
from trioserve.errors import KVCacheFullError, PermissionDeniedError, UnavailableError
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.testing.vocab import ScriptedConstraint
from trioserve.types import (
    AdapterInfo,
    Adapters,
    CacheRoot,
    CellKey,
    Chunk,
    Failed,
    Finished,
    GenerationParams,
    Grammar,
    Prompt,
    Task,
    Thinking,
    ThinkingBudget,
)
from trioserve.types.task import shared_length

N_CTX = 160

#: Ends the reasoning that all outputs are.
THOUGHT = "..!"

#: Prompts that share a beginning more often than not.
prompts = st.builds(
    str.__add__, st.sampled_from(["", "a" * 10, "a" * 20]), st.text("ab", min_size=1, max_size=10)
)

#: The owners of prompts; empty: all clients.
owners = st.sampled_from(["", "", "x"])


NGRAMS = NgramRules(name="ngram-mod", n=2, n_max=6, shared=True)


ANYTHING = ScriptedConstraint(Grammar("regex", "(.|\\n)*"))


class Dreamer:
    """Guesses letters that do not depend on much."""

    name, is_free, step_s, n_max = "dreamer", False, 0.0, 64

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        return [tuple(b"ABBA"[len(one.keys) % 4 :])[: one.n_max] for one in requests]

    def forget(self, slot_id: int) -> None:
        pass

    def close(self) -> None:
        pass


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine with a cache so small that runs are preempted all the time.

    Invariants: the slots hold what the backend holds; a task has at most one last event, and
    nothing after it or after its cancel; what it says is a beginning of what it must say; and of
    its prompt, nothing was there that only others had sent, who do not share with it.
    """

    n_seqs = 7
    n_ctx_seq = N_CTX
    is_elastic = False
    n_ctx_copies = 0
    can_cut = True
    cuttable = 0
    window = 0
    cache_ram = 400
    max_idle: int | None = 10
    n_spare_cores = 0
    n_adapters = 0
    checkpoints = CheckpointRules(per_slot=0)
    has_drafters = False
    n_forced = 0

    def __init__(self) -> None:
        super().__init__()
        self.backend = ScriptedBackend(
            n_slots=5,
            n_seqs=self.n_seqs,
            n_ctx=N_CTX,
            n_ctx_seq=self.n_ctx_seq,
            n_batch=16,
            is_elastic=self.is_elastic,
            n_ctx_copies=self.n_ctx_copies,
            can_cut=self.can_cut,
            cuttable=self.cuttable,
            window=self.window,
            adapters=[AdapterInfo(path=str(i)) for i in range(self.n_adapters)],
            drafters=[NgramDrafter(NGRAMS), Dreamer()] if self.has_drafters else [],
            projector=self.make_projector(),
        )
        self.backend.n_spare_cores = self.n_spare_cores
        self.backend.on_decode = self.has_room
        if self.n_forced:
            self.backend.n_outputs = 6
            self.backend.n_batch = self.backend.batch.n_batch = 6 + 5 * self.n_forced
            self.backend.n_forced = lambda said: len(said) % (self.n_forced + 2)
        self.engine = Engine(
            self.backend,
            DecodeMaximal(),
            lambda: None,
            cache_ram=self.cache_ram,
            max_idle=self.max_idle,
            checkpoints=self.checkpoints,
        )
        self.engine._scheduler.cache.min_shared = 3
        self.engine.drafts.costs = FlatCosts()
        if self.n_adapters:
            self.engine._scheduler.planner.turns = AdapterTurns(2, now=itertools.count().__next__)
        self.prompts: dict[int, str] = {}  # as the script sees them
        self.cells: dict[int, tuple[CellKey, ...]] = {}
        self.adapters: dict[int, Adapters] = {}
        self.roots: dict[int, CacheRoot] = {}
        self.budgets: dict[int, int | None] = {}
        self.said: dict[int, str] = {}
        self.ended: set[int] = set()
        self.cancelled: set[int] = set()
        self.paused: set[int] = set()

    def make_projector(self) -> ScriptedProjector | None:
        return None

    def make_prompt(self, text: str, divergence_points: list[int]) -> tuple[Prompt, str]:
        return Prompt(text.encode(), divergence_points=divergence_points), text

    def has_room(self, backend: ScriptedBackend) -> None:
        """The scheduler has seen to it that all of a batch fits."""
        assert backend.n_cells + backend.n_new <= N_CTX + self.n_ctx_copies

    @rule(
        prompt=prompts,
        id_slot=st.sampled_from([-1, -1, -1, 0, 4]),
        cache_prompt=st.booleans(),
        max_tokens=st.sampled_from([-1, 0, 1, 7]),
        priority=st.sampled_from([0, 0, -1, 1]),
        client=st.sampled_from("ab"),
        adapters=st.sampled_from([(), ((0, 1.0),), ((0, 0.5),), ((0, 0.5), (1, -1.0))]),
        owner=owners,
        salt=st.sampled_from(["", "", "y"]),
        n_thinking=st.sampled_from([None, None, -1, -1, 0, 3]),
        divergence_points=st.lists(st.integers(0, 30), max_size=3),
    )
    def submit(
        self,
        prompt: str,
        client: str,
        adapters: Adapters,
        owner: str,
        salt: str,
        n_thinking: int | None,
        divergence_points: list[int],
        **options: int,
    ) -> None:
        task_id = len(self.prompts) + 1
        adapters = adapters if self.n_adapters else ()
        thinking = Thinking(start="", end=THOUGHT, begun=True)
        closing = tuple(THOUGHT.encode())
        budget = None
        made, seen = self.make_prompt(prompt, divergence_points)
        if len(made) >= self.n_ctx_seq:
            return
        if n_thinking is not None:
            budget = ThinkingBudget(thinking=thinking, n_tokens=n_thinking, closing=closing)
        task = Task(
            task_id,
            made,
            GenerationParams(**options),
            client,
            root=CacheRoot(adapters, owner, salt),
            budget=budget,
            constraint=ANYTHING if self.n_forced else None,
        )
        self.engine.submit(task)
        self.budgets[task_id] = n_thinking
        self.adapters[task_id] = adapters
        self.roots[task_id] = task.root
        self.prompts[task_id], self.said[task_id] = seen, ""
        self.cells[task_id] = tuple(made.keys)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.cancel(task_id)
        self.cancelled.add(task_id)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.prompts)))
        if task_id in self.paused:
            self.engine.resume(task_id)
            self.paused.remove(task_id)
        else:
            self.engine.pause(task_id)
            self.paused.add(task_id)

    @rule(n=st.integers(1, 10), check_each=st.booleans())
    def step(self, n: int, check_each: bool) -> None:
        for left in reversed(range(n)):
            work_left = self.engine.step()
            if check_each or not left:  # to check brings the books up to date
                self.engine.check_integrity()
            assert work_left or self.waits_for_others(), "a request waits for a paused one's slot"
            self._read()

    def waits_for_others(self) -> bool:
        return not self.engine._scheduler.waiting

    def _read(self) -> None:
        for event in take_events(self.engine):
            task_id = event.task_id
            assert task_id not in self.ended, "an event after the last one"
            assert task_id not in self.cancelled, "an event after the cancel"
            if isinstance(event, Chunk):
                self.said[task_id] += event.text
            if isinstance(event, Failed):
                assert self.may_fail(event)
                self.ended.add(task_id)
            if isinstance(event, Finished):
                self.ended.add(task_id)
                assert event.timings.cache_n <= self._known(task_id)

    def may_fail(self, event: Failed) -> bool:
        """Nothing does."""
        return False

    def _known(self, task_id: int) -> int:
        """Count the cells of a prompt that may be cached: texts of others with the same root."""
        prompt = self.cells[task_id]
        texts = (
            (*self.cells[other], *self.whole(other).encode())
            for other, root in self.roots.items()
            if other != task_id and root == self.roots[task_id]
        )
        return max((shared_length(prompt, text) for text in texts), default=0)

    @invariant()
    def speaks_its_own_text(self) -> None:
        for task_id, text in self.said.items():
            assert self.whole(task_id).startswith(text)

    def whole(self, task_id: int) -> str:
        """The whole output of a task, if nothing ends it early."""
        begun = "".join(f"<{id_}:{scale:g}>" for id_, scale in self.adapters[task_id])
        whole = begun + self.prompts[task_id].upper()
        n = self.budgets[task_id]
        if n is not None and 0 <= n <= len(whole):
            whole = whole[:n] + THOUGHT + whole[n:]
        return whole

    @rule(n_right=st.integers(0, 4), n_wrong=st.integers(0, 2))
    def propose(self, n_right: int, n_wrong: int) -> None:
        for slot in self.engine._scheduler.slots:
            if slot.request is not None and slot.in_decode:
                n_said = slot.request.n_output
                draft = self.whole(slot.request.task.id)[n_said : n_said + n_right] + "?" * n_wrong
                self.engine._scheduler.propose([(slot, tuple(draft.encode()))])
        self.engine.check_integrity()

    @rule()
    def interrupt(self) -> None:
        self.backend.interrupt()

    @rule(slot_id=st.integers(0, 4), erase=st.booleans(), owner=owners)
    def save_restore_or_erase(self, slot_id: int, erase: bool, owner: str) -> None:
        engine = self.engine
        slot = engine._scheduler.slots[slot_id]

        def work() -> None:
            if slot.kept and slot.root.owner != owner:
                with pytest.raises(PermissionDeniedError):
                    engine.save_slot(slot_id, owner)
                with pytest.raises(PermissionDeniedError):
                    engine.erase_slot(slot_id, owner)
                return
            if erase:
                engine.erase_slot(slot_id, owner)
                return
            try:
                saved = engine.save_slot(slot_id, owner)
            except UnavailableError:
                assert min(slot.kept) < 0, "only media are computed in parts"
                return
            assert saved.root.owner == owner
            engine.erase_slot(slot_id, owner)
            try:
                engine.restore_slot(slot_id, saved)
            except KVCacheFullError:
                return
            assert slot.kept == list(saved.keys)

        self.engine.call(work, slot_id=slot_id)

    def teardown(self) -> None:
        """All requests end, and everything is freed."""
        for task_id in self.paused:
            self.engine.resume(task_id)
        for _ in range(10_000):
            work_left = self.engine.step()
            self.engine.check_integrity()
            self._read()
            if not work_left and not self.help():
                break
        assert self.ended | self.cancelled == set(self.prompts)
        assert self.backend.n_samplers == 0
        self.engine.stop()
        self.engine.run()

    def help(self) -> bool:
        """Do what others do for the engine; returns whether there was anything."""
        return False


class CheckpointMachine(EngineMachine):
    """The same with a model that can append, start again, or go back to a checkpoint."""

    can_cut = False
    checkpoints = CheckpointRules(per_slot=2, step=7, min_gap=1)

    @rule(n=st.integers(0, 2))
    def let_rewinds_fail(self, n: int) -> None:
        outcomes = itertools.chain([False] * n, itertools.repeat(True))
        self.backend.on_rewind = lambda: next(outcomes)


SPLIT: dict[str, object] = {"n_seqs": 5, "n_ctx_seq": N_CTX // 5}
ELASTIC: dict[str, object] = {"n_seqs": 5, "is_elastic": True}
COPIES: dict[str, object] = {**ELASTIC, "n_ctx_copies": 30}


def run_machine(machine: type[EngineMachine], n_examples: int, **fields: object) -> None:
    quick = settings(max_examples=n_examples, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(type(machine.__name__, (machine,), fields), settings=quick)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        SPLIT,
        ELASTIC,
        {**COPIES, "has_drafters": True},
        {"n_spare_cores": 2, "max_idle": None},  # threads sample, and idle cells are kept
        {"has_drafters": True, "n_adapters": 2},
        {"has_drafters": True, "n_forced": 4},
        {"can_cut": False},
        {"can_cut": False, "n_forced": 4},
        {"n_seqs": 5, "cache_ram": 0},
    ],
    ids=str,
)
def test_the_invariants_hold(fields: dict[str, object]) -> None:
    run_machine(EngineMachine, 25, **fields)


@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 30}, SPLIT, ELASTIC, {"cuttable": 20}, {**COPIES, "cuttable": 20}],
    ids=str,
)
def test_the_invariants_hold_with_checkpoints(fields: dict[str, object]) -> None:
    run_machine(CheckpointMachine, 25, **fields)


@pytest.mark.parametrize(
    ("leader", "follower", "n_shared", "waits"),
    [
        ({}, {}, 100, True),
        ({"cache_prompt": False}, {}, 100, False),
        ({}, {"cache_prompt": False}, 100, False),
        ({}, {"root": CacheRoot(owner="x")}, 100, False),
        ({}, {}, 33, True),
        ({}, {}, 32, False),  # not worth a wait
    ],
)
def test_a_request_follows_another_that_prefills_their_prefix(
    leader: dict[str, object], follower: dict[str, object], n_shared: int, waits: bool
) -> None:
    harness = Harness(ScriptedBackend(n_slots=2, n_batch=16))
    shared = "s" * n_shared
    harness.submit(1, "s" * 100 + "one", **leader)
    harness.submit(2, shared + "two", **follower)
    harness.step()
    assert harness.admitted == ([1] if waits else [1, 2])
    harness.run()
    assert harness.admitted == [1, 2]
    assert harness.text(2) == shared.upper() + "TWO"
    assert harness.finish(2).timings.cache_n == (len(shared) if waits else 0)


def test_a_paused_prompt_holds_up_no_other() -> None:
    harness = Harness(ScriptedBackend(n_slots=2, n_batch=16))
    harness.submit(1, "s" * 100)
    harness.step()
    harness.engine.pause(1)
    harness.submit(2, "s" * 100)
    harness.step()
    assert harness.admitted == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "options", "fits"),
    [
        ("b" * 48, {}, True),
        ("b" * 49, {}, False),
        ("a" * 40 + "b" * 48, {}, True),
        ("a" * 40 + "b" * 49, {}, False),
        ("a" * 40 + "b" * 48, {"cache_prompt": False}, False),
        ("z" * 35 + "b" * 13, {}, True),
        ("z" * 35 + "b" * 14, {}, False),  # the z are not in use, and make way
    ],
)
def test_a_run_starts_when_it_fits_beside_the_others_with_one_token_more(
    prompt: str, options: dict[str, object], fits: bool
) -> None:
    harness = Harness(ScriptedBackend(n_slots=2, n_seqs=3, n_ctx=100))
    harness.complete(1, "z" * 35, max_tokens=1)
    harness.submit(2, "a" * 50, max_tokens=3)
    harness.step()
    harness.submit(3, prompt, max_tokens=1, **options)
    harness.step()
    assert harness.admitted == ([1, 2, 3] if fits else [1, 2])
    harness.run()
    assert harness.admitted == [1, 2, 3] and harness.text(3) == prompt[0].upper()


def test_others_go_on_while_one_waits_for_the_slot_it_asks_for() -> None:
    harness = Harness(ScriptedBackend(n_slots=2))
    harness.submit(1, "hello")
    harness.step()
    harness.submit(2, "me", id_slot=0)
    harness.submit(3, "you")
    harness.step()
    assert harness.admitted == [1, 3]
    harness.run()
    assert harness.admitted == [1, 3, 2] and harness.finish(2).slot_id == 0
