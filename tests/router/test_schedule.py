"""The choice of the models that run: rules one by one, and then events in any order."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trioserve.errors import ModelLoadError
from trioserve.router.schedule import PATIENCE, Lease, Plan, Schedule

ERROR = ModelLoadError("It does not load.")


def nothing() -> None:
    pass


def join(schedule: Schedule, name: str) -> Lease:
    return schedule.join(name, nothing)


def running(schedule: Schedule, *names: str) -> None:
    """Have models that are ready, the first one least recently used."""
    for name in names:
        schedule.want(name)
        assert schedule.decide().start == (name,)
        schedule.ready(name)


# -- one by one


def test_a_request_starts_its_model_and_waits_for_it() -> None:
    schedule = Schedule(max_models=1)
    lease = join(schedule, "a")
    assert schedule.decide() == Plan(start=("a",))
    assert not lease.granted
    schedule.ready("a")
    assert lease.granted
    assert join(schedule, "a").granted, "and another does not wait"


def test_all_requests_for_a_model_share_one_start() -> None:
    schedule = Schedule()
    leases = [join(schedule, "a"), join(schedule, "a")]
    assert schedule.decide() == Plan(start=("a",))
    leases.append(join(schedule, "a"))
    assert schedule.decide() == Plan()
    schedule.ready("a")
    assert all(lease.granted for lease in leases)


def test_the_least_recently_used_model_gives_way() -> None:
    schedule = Schedule(max_models=2)
    running(schedule, "a", "b")
    schedule.leave(join(schedule, "a"))
    join(schedule, "c")
    assert schedule.decide() == Plan(stop=("b",))
    schedule.gone("b", ERROR)
    assert schedule.decide() == Plan(start=("c",))


def test_a_model_that_sleeps_gives_way_first() -> None:
    schedule = Schedule(max_models=2)
    running(schedule, "a", "b")
    schedule.asleep("b")
    join(schedule, "c")
    assert schedule.decide().stop == ("b",)


def test_a_model_in_use_does_not_give_way() -> None:
    schedule = Schedule(max_models=1)
    running(schedule, "a")
    user = join(schedule, "a")
    waiting = join(schedule, "b")
    assert schedule.decide() == Plan()
    schedule.leave(user)
    assert schedule.decide().stop == ("a",)
    assert not waiting.granted


def test_nobody_gives_way_for_a_request_that_has_left() -> None:
    schedule = Schedule(max_models=1)
    running(schedule, "a")
    user = join(schedule, "a")
    schedule.leave(join(schedule, "b"))
    schedule.leave(user)
    assert schedule.decide() == Plan()


def test_several_give_way_at_once_and_the_queue_keeps_its_order() -> None:
    schedule = Schedule(max_models=2)
    running(schedule, "a", "b")
    for name in "cde":
        join(schedule, name)
    assert schedule.decide().stop == ("a", "b")
    schedule.gone("b", ERROR)
    assert schedule.decide() == Plan(start=("c",))
    schedule.gone("a", ERROR)
    assert schedule.decide() == Plan(start=("d",))


def test_a_model_that_fails_to_load_refuses_those_who_waited() -> None:
    schedule = Schedule()
    lease = join(schedule, "a")
    schedule.decide()
    schedule.gone("a", ERROR)
    assert lease.error is ERROR
    assert schedule.decide() == Plan(), "no request waits for it"


def test_a_request_for_a_model_that_is_being_stopped_gets_the_next_start() -> None:
    schedule = Schedule(max_models=1)
    running(schedule, "a")
    assert schedule.unload("a", ERROR)
    lease = join(schedule, "a")
    assert schedule.decide() == Plan()
    schedule.gone("a", ERROR)
    assert lease.error is None
    assert schedule.decide() == Plan(start=("a",))


def test_to_stop_a_model_that_loads_keeps_those_who_wait_and_to_unload_it_does_not() -> None:
    schedule = Schedule()
    kept = join(schedule, "a")
    refused = join(schedule, "b")
    schedule.decide()
    assert schedule.stop("a") and schedule.unload("b", ERROR)
    assert kept.error is None and refused.error is ERROR
    schedule.gone("a", ERROR)
    schedule.gone("b", ERROR)
    assert schedule.decide() == Plan(start=("a",))


def test_a_model_that_is_held_lets_others_pass() -> None:
    schedule = Schedule(max_models=1)
    schedule.hold("a")
    join(schedule, "a")
    join(schedule, "b")
    assert schedule.decide() == Plan(start=("b",))
    schedule.release("a")
    schedule.gone("b", ERROR)
    assert schedule.decide() == Plan(start=("a",))


def test_the_position_counts_the_requests_before() -> None:
    schedule = Schedule(max_models=1)
    running(schedule, "a")
    user = join(schedule, "a")
    line = [join(schedule, name) for name in "bbcb"]
    schedule.decide()
    assert [schedule.position(one) for one in line] == [0, 1, 3, 2]
    schedule.leave(line[0])
    assert [schedule.position(one) for one in line[1:]] == [0, 2, 1]
    schedule.leave(user)


def test_a_model_that_dies_takes_no_more_requests() -> None:
    schedule = Schedule()
    running(schedule, "a")
    schedule.dying("a")
    lease = join(schedule, "a")
    assert not lease.granted
    schedule.gone("a", ERROR)
    assert lease.error is None
    assert schedule.decide() == Plan(start=("a",))


# -- memory


def test_a_model_waits_for_its_estimate_and_then_for_memory() -> None:
    schedule = Schedule(max_memory=10)
    join(schedule, "a")
    assert schedule.decide() == Plan(estimate=("a",))
    assert schedule.decide() == Plan(), "it is asked for once"
    schedule.estimated("a", 6)
    assert schedule.decide() == Plan(start=("a",))
    schedule.ready("a")
    assert schedule.need_of("a") == 6
    join(schedule, "b")
    schedule.decide()
    schedule.estimated("b", 5)
    assert schedule.decide() == Plan(), "both together are too large"


def test_a_model_that_never_fits_is_refused() -> None:
    schedule = Schedule(max_memory=2**20)
    lease = join(schedule, "a")
    schedule.decide()
    schedule.estimated("a", 3 * 2**20)
    assert schedule.decide() == Plan()
    assert isinstance(lease.error, ModelLoadError)
    assert "3 MiB" in lease.error.message and "1 MiB" in lease.error.message
    again = join(schedule, "a")
    schedule.decide()
    assert again.error is not None


def test_a_measured_model_counts_with_what_it_has_or_will_have() -> None:
    schedule = Schedule(max_memory=-1)
    line = [schedule.join(name, lambda: None) for name in ("a", "b")]
    assert schedule.decide() == Plan(estimate=("a", "b"))
    schedule.limit(10)
    schedule.estimated("a", 4)
    schedule.estimated("b", 6)
    assert schedule.decide().start == ("a", "b"), "all that is free is taken"
    schedule.ready("a")
    schedule.ready("b")
    schedule.measured("a", 5)  # it has grown, and what is free has shrunk
    schedule.limit(10)
    third = schedule.join("c", lambda: None)
    assert schedule.decide().estimate == ("c",), "each start has a separate estimate"
    schedule.estimated("c", 1)
    assert schedule.decide() == Plan(), "both are in use"
    schedule.limit(12)
    assert schedule.decide() == Plan(start=("c",)), "others have freed some"
    schedule.leave(line[0])
    schedule.leave(third)
    schedule.stop("c")
    schedule.gone("c", ERROR)
    schedule.limit(10)
    schedule.join("d", lambda: None)
    schedule.decide()
    schedule.estimated("d", 2)
    assert schedule.decide().stop == ("a",), "the idle one, and never a busy one"


def test_what_a_device_has_counts_for_itself() -> None:
    schedule = Schedule(max_memory=-1)
    for name in ("a", "b"):
        schedule.join(name, lambda: None)
    schedule.decide()
    schedule.limit(100, (8, 8))
    schedule.estimated("a", 1, (5, 0))
    schedule.estimated("b", 1, (4, 4))
    assert schedule.decide().start == ("a",), "the first device has no room for both"
    schedule.limit(100, (9, 8))
    assert schedule.decide().start == ("b",)
    refused = schedule.join("c", lambda: None)
    schedule.decide()
    schedule.estimated("c", 101)
    schedule.decide()
    assert refused.error is not None and "would be free without the others" in str(refused.error)


@pytest.mark.parametrize(
    ("needs", "stopped"), [((1, 8, 7), ("large",)), ((4, 5, 8), ("small", "large"))]
)
def test_no_more_models_give_way_than_the_memory_needs(
    needs: tuple[int, ...], stopped: tuple[str, ...]
) -> None:
    schedule = Schedule(max_memory=10)
    for name, need in zip(("small", "large", "wanted"), needs, strict=True):
        schedule.estimated(name, need)
    running(schedule, "small", "large")
    join(schedule, "wanted")
    assert schedule.decide().stop == stopped


def test_none_gives_way_if_that_would_not_be_enough() -> None:
    schedule = Schedule(max_memory=10)
    for name, need in (("small", 1), ("large", 8), ("wanted", 7)):
        schedule.estimated(name, need)
    running(schedule, "small", "large")
    user = join(schedule, "large")
    join(schedule, "wanted")
    assert schedule.decide() == Plan()
    schedule.leave(user)
    assert schedule.decide().stop == ("large",)


# -- a model that is never idle


def test_a_model_that_is_never_idle_gives_way_in_the_end() -> None:
    schedule = Schedule(max_models=1)
    running(schedule, "a")
    users = [join(schedule, "a")]
    waiting = join(schedule, "b")
    while True:
        users.append(join(schedule, "a"))
        if not users[-1].granted:
            break
        schedule.leave(users[-2])
        assert not schedule.decide().stop, "it is in use"
    assert len(users) == PATIENCE + 2, "the first one was there before, and the last one waits"
    schedule.leave(users[-2])
    assert schedule.decide().stop == ("a",)
    schedule.gone("a", ERROR)
    schedule.decide()
    schedule.ready("b")
    assert waiting.granted and not users[-1].granted


def test_a_model_takes_requests_again_when_those_it_had_to_give_way_for_have_left() -> None:
    schedule = Schedule(max_models=1)
    running(schedule, "a")
    users = [join(schedule, "a")]
    first = join(schedule, "b")
    users += [join(schedule, "a") for _ in range(PATIENCE)]
    schedule.decide()
    late = join(schedule, "a")
    assert not late.granted
    schedule.leave(first)
    schedule.decide()
    assert late.granted


# -- anything


@attrs.define(eq=False)
class Asked:
    """A request, as the test knows it."""

    name: str
    lease: Lease
    n_changes: int = 0
    is_lost: bool = False  # the process that it used has ended


NAMES = st.sampled_from("abcde")
NEEDS = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8}


class AnyOrder(RuleBasedStateMachine):
    """Requests come and go, processes start, die and end, and people load and unload."""

    @initialize(max_models=st.integers(0, 3), max_memory=st.sampled_from([0, 8, 12]))
    def begin(self, max_models: int, max_memory: int) -> None:
        self.schedule = Schedule(max_models=max_models, max_memory=max_memory)
        self.asked: list[Asked] = []  # all that have not left
        self.loading: set[str] = set()
        self.ready: set[str] = set()
        self.stopping: set[str] = set()
        self.estimating: set[str] = set()
        self.held: set[str] = set()
        self.queue: list[str] = []  # the names in the order in which they began to wait

    # -- what the test does

    @rule(name=NAMES)
    def a_request_comes(self, name: str) -> None:
        asked = Asked(name, None)  # type: ignore[arg-type]

        def changed() -> None:
            asked.n_changes += 1

        asked.lease = self.schedule.join(name, changed)
        self.asked.append(asked)
        self.turn()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def a_request_leaves(self, data: st.DataObject) -> None:
        asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        self.schedule.leave(asked.lease)
        self.turn()

    @rule(name=NAMES)
    def somebody_loads(self, name: str) -> None:
        self.schedule.want(name)
        self.turn()

    @rule(name=NAMES, kept=st.booleans())
    def somebody_unloads(self, name: str, kept: bool) -> None:
        runs = name in self.loading | self.ready
        if kept:
            assert self.schedule.stop(name) == runs
        else:
            assert self.schedule.unload(name, ERROR) == runs
        if runs:
            self.loading.discard(name)
            self.ready.discard(name)
            self.stopping.add(name)
        self.turn()

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def a_model_is_ready(self, data: st.DataObject) -> None:
        name = pick(data, self.loading)
        self.ready.add(name)
        self.schedule.ready(name)
        self.turn()

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def a_model_falls_asleep(self, data: st.DataObject) -> None:
        self.schedule.asleep(data.draw(st.sampled_from(sorted(self.ready))))
        self.turn()

    @precondition(lambda self: self.loading | self.ready | self.stopping)
    @rule(data=st.data())
    def a_process_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading | self.ready | self.stopping)))
        for some in (self.loading, self.ready, self.stopping):
            some.discard(name)
        for one in self.asked:
            one.is_lost |= one.name == name and one.lease.granted
        self.schedule.gone(name, ERROR)
        self.turn()

    @precondition(lambda self: self.estimating)
    @rule(data=st.data(), works=st.booleans())
    def an_estimate_is_there(self, data: st.DataObject, works: bool) -> None:
        name = pick(data, self.estimating)
        if works:
            self.schedule.estimated(name, NEEDS[name])
        else:
            self.schedule.not_estimated(name, ERROR)
        self.turn()

    @rule(name=NAMES)
    def a_model_is_held(self, name: str) -> None:
        self.schedule.hold(name)
        self.held.add(name)
        self.turn()

    @rule(name=NAMES)
    def a_model_is_released(self, name: str) -> None:
        self.schedule.release(name)
        self.held.discard(name)
        self.turn()

    # -- what must be so

    def turn(self) -> None:
        """Take a decision, and look at it."""
        in_use = {one.name for one in self.asked if one.lease.granted and not one.is_lost}
        self.note_queue()
        decision = self.schedule.decide()
        for name in decision.stop:
            assert name in self.ready, "only a ready model is stopped"
            assert name not in in_use, "and no model in use"
            self.ready.remove(name)
            self.stopping.add(name)
        for name in decision.start:
            assert name not in self.loading | self.ready | self.stopping
            free = [one for one in self.queue if one not in self.held]
            assert name == free[0], "the order is kept"
            self.queue.remove(name)
            self.loading.add(name)
        for name in decision.estimate:
            assert name not in self.estimating
            self.estimating.add(name)
        self.note_queue()

    def note_queue(self) -> None:
        """Follow the queue: who is no longer in it, and who is new at its end."""
        now = [name for name in "abcde" if self.schedule.is_queued(name)]
        self.queue = [name for name in self.queue if name in now]
        self.queue += [name for name in now if name not in self.queue]

    @invariant()
    def there_are_no_more_than_may_be(self) -> None:
        runs = self.loading | self.ready | self.stopping
        if self.schedule.max_models:
            assert len(runs) <= self.schedule.max_models
        if self.schedule.max_memory:
            assert sum(NEEDS[name] for name in runs) <= self.schedule.max_memory

    @invariant()
    def each_request_waits_or_was_told(self) -> None:
        waiting = set(self.schedule.waiting())
        for one in self.asked:
            states = (one.lease in waiting, one.lease.granted, one.lease.error is not None)
            assert sum(states) == 1, states
            assert one.n_changes == (not states[0]), "it hears once"
        assert len(waiting) == sum(one.lease in waiting for one in self.asked)

    @invariant()
    def nobody_waits_for_what_is_ready(self) -> None:
        for one in self.schedule.waiting():
            if one.model in self.ready:
                others = [name for name in self.queue if name != one.model]
                assert others, "unless another model was overtaken for long"

    @invariant()
    def the_users_are_counted(self) -> None:
        for name in self.ready:
            users = [one for one in self.asked if one.name == name and one.lease.granted]
            assert self.schedule.n_users(name) == sum(not one.is_lost for one in users)

    def teardown(self) -> None:
        """Each waiting request is answered once all starts and estimates have ended."""
        if not hasattr(self, "schedule"):
            return
        for name in list(self.held):
            self.a_model_is_released(name)
        for _ in range(100):
            for name in list(self.estimating):
                self.estimating.remove(name)
                self.schedule.estimated(name, NEEDS[name])
            for name in list(self.loading):
                self.loading.remove(name)
                self.ready.add(name)
                self.schedule.ready(name)
            for name in list(self.stopping):
                self.stopping.remove(name)
                self.schedule.gone(name, ERROR)
            for one in [one for one in self.asked if one.lease.granted]:
                self.asked.remove(one)
                self.schedule.leave(one.lease)
            self.turn()
        assert not list(self.schedule.waiting())


def pick(data: st.DataObject, some: set[str]) -> str:
    """Take one of them out."""
    name = data.draw(st.sampled_from(sorted(some)))
    some.remove(name)
    return name


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
