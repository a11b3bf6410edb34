"""Fixtures of the tests of grammars."""

from collections.abc import Iterator

import pytest

from trioserve import llama
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar import trial


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    """The bundled model with four slots."""
    with llama.load(Config(threads=1, ctx_size=4096, parallel=4)) as backend:
        yield backend


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grammar takes so long here that a process would have to try it."""
    monkeypatch.setattr(trial, "run", lambda *_: None)
