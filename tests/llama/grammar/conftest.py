"""What the tests of grammars share."""

from collections.abc import Iterator

import pytest

from trioserve import llama
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    """The bundled model with four slots."""
    with llama.load(Config(threads=1, ctx_size=4096, parallel=4)) as backend:
        yield backend
