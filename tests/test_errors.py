"""An error that is raised again, in another task."""

from __future__ import annotations

import pytest

from trioserve.errors import (
    ContextLengthExceededError,
    EngineError,
    QueueFullError,
    TrioServeError,
    raised_alone,
)


def test_an_error_is_raised_again_with_all_but_its_frames() -> None:
    try:
        raise ContextLengthExceededError(10, 5) from KeyError("why")
    except ContextLengthExceededError as error:
        first = error
    second = first.again()
    assert type(second) is ContextLengthExceededError and second is not first
    assert (str(second), second.param, second.n_ctx) == (str(first), "prompt", 5)
    assert second.__cause__ is first.__cause__
    assert first.__traceback__ is not None and second.__traceback__ is None


@pytest.mark.parametrize("error", [QueueFullError("full", retry_after=5), TrioServeError("x")])
def test_every_kind_of_error_can_be_raised_again(error: TrioServeError) -> None:
    second = error.again()
    assert (type(second), vars(second), second.args) == (type(error), vars(error), error.args)


def test_an_exception_is_taken_out_of_groups_of_one() -> None:
    error = EngineError("broken")
    assert raised_alone(error) is error
    assert raised_alone(ExceptionGroup("", [ExceptionGroup("", [error])])) is error
    several = ExceptionGroup("", [error, ValueError()])
    assert raised_alone(ExceptionGroup("", [several])) is several
