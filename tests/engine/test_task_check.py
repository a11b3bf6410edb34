"""Tasks at the limits of what an engine takes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

from tests.support.scripted_media import prompt_of
from trioserve.engine import DecodeMaximal, Engine
from trioserve.errors import (
    ContextLengthExceededError,
    EngineError,
    InvalidMediaError,
    InvalidRequestError,
)
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.types import AdapterInfo, CacheRoot, GenerationParams, Grammar, Prompt, Task

Error = type[Exception] | None


def engine_of(backend: ScriptedBackend) -> Engine:
    return Engine(backend, DecodeMaximal(), lambda: None)


def outcome(error: Error) -> AbstractContextManager[object]:
    return nullcontext() if error is None else pytest.raises(error)


@pytest.mark.parametrize(
    ("prompt", "options", "adapters", "error"),
    [
        ((), {}, (), InvalidRequestError),
        ((0, 256), {}, (), None),
        ((257,), {}, (), InvalidRequestError),
        ((1,) * 19, {}, (), None),
        ((1,) * 20, {}, (), ContextLengthExceededError),
        ((1,), {"id_slot": 1}, (), None),
        ((1,), {"id_slot": 2}, (), InvalidRequestError),
        ((1,), {}, ((0, 1.0),), None),
        ((1,), {}, ((0, 1.0), (1, 1.0)), InvalidRequestError),
        ((1,), {"grammar": Grammar("regex", "a")}, (), EngineError),
    ],
)
def test_a_task_fits_the_context_the_vocabulary_the_slots_and_the_adapters(
    prompt: tuple[int, ...],
    options: dict[str, object],
    adapters: tuple[tuple[int, float], ...],
    error: Error,
) -> None:
    backend = ScriptedBackend(n_slots=2, n_ctx=20, adapters=[AdapterInfo(path="0")])
    task = Task(1, Prompt(prompt), GenerationParams(**options), root=CacheRoot(adapters))
    with outcome(error):
        engine_of(backend).check(task)


@pytest.mark.parametrize(
    ("is_causal", "n_cells", "max_chunk", "error"),
    [
        (False, 64, 0, None),
        (False, 65, 0, InvalidMediaError),
        (False, 16, 16, None),
        (False, 17, 16, InvalidMediaError),
        (False, 65, 100, InvalidMediaError),
        (True, 65, 16, None),  # it is decoded in parts
    ],
)
def test_a_chunk_that_is_decoded_whole_fits_what_is_decoded_at_once(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, n_cells: int, max_chunk: int, error: Error
) -> None:
    monkeypatch.setattr(ScriptedProjector, "max_chunk", max_chunk)
    projector = ScriptedProjector(n_cells=n_cells, is_causal=is_causal)
    backend = ScriptedBackend(n_batch=64, projector=projector)
    with outcome(error):
        engine_of(backend).check_media(prompt_of("see [image:x]", projector), "prompt")
