"""A fixture for the tests of chats."""

from collections.abc import Iterator

import pytest

from trioserve import llama
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    """The bundled model, to compile grammars for."""
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        yield backend
