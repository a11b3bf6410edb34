"""What the tests of routes share."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.clients import client_of


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that answers from the default script."""
    async with client_of() as client:
        yield client
