"""The end of an app."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.service import Service
from trioserve.errors import ModelLoadError


async def test_an_app_that_did_not_start_need_not_stop() -> None:
    async with trio.open_nursery() as nursery:
        service, stopped = Service(), trio.Event()

        async def stop() -> None:
            await service.stop()
            stopped.set()

        nursery.start_soon(stop)
        await wait_all_tasks_blocked()
        was_stopped = stopped.is_set()
        await service.run()  # as an app may that was stopped before its task began
        assert was_stopped and stopped.is_set()


async def test_each_request_has_the_failure_of_a_service_as_an_error_of_its_own() -> None:
    service = Service()
    service.failure = ModelLoadError("no such file")
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="no such file"):
            _ = service.server
    assert service.failure.__traceback__ is None


async def test_a_failure_in_a_group_of_one_is_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    service, cause = Service(), OSError("torn")
    failure = ModelLoadError("no such file")
    failure.__cause__ = cause

    async def serve(task_status: trio.TaskStatus[None]) -> None:
        raise ExceptionGroup("", [ExceptionGroup("", [failure])])

    monkeypatch.setattr(service, "_serve", serve)
    with pytest.raises(ModelLoadError) as caught:
        await service.run()
    assert service.failure is caught.value is failure
    assert failure.__cause__ is cause
    await service.wait_ended()
