"""The order of the queue: priorities, ageing, fairness, and arrival."""

from __future__ import annotations

from trioserve.engine.queue import AGEING_S, WaitingQueue
from trioserve.engine.slot import RequestState
from trioserve.types import GenerationParams, Prompt, Task


class Queue(WaitingQueue):
    """A queue with a separate clock, and short words."""

    def __init__(self) -> None:
        super().__init__(lambda: self.time)
        self.time = 0.0
        self.last_id = 0

    def arrive(self, client: str = "", priority: int = 0, weight: float = 1.0) -> RequestState:
        self.last_id += 1
        options = GenerationParams(priority=priority)
        run = RequestState(Task(self.last_id, Prompt((1,)), options, client, weight))
        run.submitted_at = self.time
        self.push(run)
        return run

    def ids(self) -> list[int]:
        return [run.task.id for run in self]

    def clients(self) -> str:
        order = []
        while len(self):
            run = next(iter(self))
            self.admit(run)
            order.append(run.task.client)
        return "".join(order)


def test_a_higher_priority_goes_first() -> None:
    queue = Queue()
    for priority in (0, 5, -1, 5):
        queue.arrive(priority=priority)
    assert queue.ids() == [2, 4, 1, 3]


def test_clients_take_turns() -> None:
    queue = Queue()
    for client in "aaaabb":
        queue.arrive(client)
    assert queue.clients() == "ababaa"


def test_a_client_that_comes_later_does_not_wait_for_all_of_a_flood() -> None:
    queue = Queue()
    for _ in range(10):
        queue.arrive("a")
    for _ in range(4):
        queue.admit(next(iter(queue)))
    queue.arrive("b")
    queue.time = 5 * AGEING_S  # waiting long gives a flood no precedence
    assert "b" in queue.clients()[:2]


def test_a_weight_gives_more_turns() -> None:
    queue = Queue()
    for client in "aaaaaaabbb":
        queue.arrive(client, weight=2.0 if client == "a" else 1.0)
    assert queue.clients()[:6].count("a") == 4


def test_a_low_priority_rises_while_it_waits_but_not_above_the_others() -> None:
    queue = Queue()
    low = queue.arrive(priority=-3)
    queue.time = 2.5 * AGEING_S
    high = queue.arrive(priority=0)
    assert [*queue] == [high, low]
    queue.time = 3.5 * AGEING_S
    assert [*queue] == [low, high]  # as high now, and older
    queue.time = 99 * AGEING_S
    higher = queue.arrive(priority=1)
    assert queue.ids()[0] == low.task.id  # old enough for this one, too
    assert higher in [*queue]


def test_a_run_that_was_preempted_has_the_next_turn_of_its_client() -> None:
    queue = Queue()
    for client in "aaabb":
        queue.arrive(client)
    preempted = queue.get(2)
    assert preempted is not None
    queue.admit(preempted)
    queue.arrive("c", priority=9)
    preempted.is_preempted = True
    queue.push(preempted)
    assert queue.ids() == [6, 2, 1, 4, 5, 3]


def test_a_run_that_gave_way_takes_another_turn() -> None:
    queue = Queue()
    gave_way = queue.arrive("a")
    queue.arrive("a")
    queue.admit(gave_way)
    queue.arrive("b")
    queue.push(gave_way)
    queue.arrive("b")
    assert queue.ids() == [3, 2, 4, 1]
