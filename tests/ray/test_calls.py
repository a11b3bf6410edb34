import asyncio

import pytest

from tests.support.ray_replicas import (
    AbsentError,
    LostError,
    Replicas,
    events,
    fails,
    json_answer,
    never,
)
from trioserve.errors import ModelProcessError
from trioserve.ray import calls
from trioserve.ray.calls import HEAD, LOST, TAKEN, UNSENT, NoReplicaError, call
from trioserve.ray.prefix_affinity import RoutingHint

SENT = ("POST", "/completion", (), b"{}")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch) -> None:
    monkeypatch.setattr(calls, "_PAUSE", 0.0)


async def _body(replicas: Replicas, patience: float = 5.0) -> bytes:
    answer = await call(replicas.target, SENT, RoutingHint(), patience=patience)
    return (await answer.whole()).body


def test_an_answer_comes_in_parts() -> None:
    replicas = Replicas(events(b"one", b"two", b"three"))
    assert asyncio.run(_body(replicas)) == b"onetwothree"


def test_a_request_goes_to_another_replica_when_the_first_dies_before_it_has_answered() -> None:
    replicas = Replicas(fails(LostError(), (TAKEN,)), json_answer({"ok": True}))
    assert asyncio.run(_body(replicas)) == b'{"ok": true}'
    assert [one.cancelled for one in replicas.responses] == [True, True]


def test_a_request_goes_to_another_replica_when_the_child_of_the_first_dies() -> None:
    replicas = Replicas(fails(None, (TAKEN,), (LOST,)), json_answer(1))
    assert asyncio.run(_body(replicas)) == b"1"


def test_a_request_that_two_replicas_die_of_is_given_up() -> None:
    replicas = Replicas(fails(LostError(), (TAKEN,)))
    with pytest.raises(ModelProcessError):
        asyncio.run(_body(replicas))
    assert len(replicas.calls) == 2


def test_a_request_that_nobody_has_taken_is_offered_again() -> None:
    unsent = fails(None, (TAKEN,), (UNSENT,))
    replicas = Replicas(unsent, fails(LostError()), unsent, fails(LostError()), json_answer(1))
    assert asyncio.run(_body(replicas)) == b"1"
    assert len(replicas.calls) == 5


def test_without_a_replica_there_is_an_error_that_says_when_to_try_again() -> None:
    replicas = Replicas(never)
    with pytest.raises(NoReplicaError) as raised:
        asyncio.run(_body(replicas, patience=0.05))
    assert (raised.value.status, raised.value.retry_after) == (503, 5.0)
    assert replicas.responses[0].cancelled


def test_a_model_that_failed_to_deploy_is_not_waited_for() -> None:
    replicas = Replicas(fails(AbsentError()))
    with pytest.raises(NoReplicaError):
        asyncio.run(_body(replicas, patience=60.0))
    assert len(replicas.calls) == 1


@pytest.mark.parametrize("last", [LostError(), (LOST,), asyncio.CancelledError()], ids=repr)
def test_an_answer_that_has_begun_is_not_begun_again(last) -> None:
    head = (HEAD, 200, [], b"one")
    parts = [last] if isinstance(last, tuple) else []
    error = last if isinstance(last, BaseException) else None
    replicas = Replicas(fails(error, (TAKEN,), head, *parts))
    with pytest.raises(ModelProcessError):
        asyncio.run(_body(replicas))
    assert len(replicas.calls) == 1


def test_a_cancelled_call_is_ended() -> None:
    replicas = Replicas(never)

    async def cancel() -> None:
        task = asyncio.create_task(_body(replicas))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert replicas.responses[0].cancelled
