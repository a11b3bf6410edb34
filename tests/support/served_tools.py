"""A server whose tools are Python functions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import attrs
import httpx

from tests.support.clients import client_and_service
from trioserve.api.service import Service
from trioserve.testing import ScriptedBackend
from trioserve.tools.registry import ToolRegistry
from trioserve.tools.tool import Tool, ToolSource


@attrs.frozen
class FixedTools(ToolSource):
    """A source that always has the same tools."""

    tools: Mapping[str, Tool]

    @classmethod
    def of(cls, tools: Iterable[Tool]) -> FixedTools:
        return cls({tool.info.name: tool for tool in tools})

    def abilities(self) -> list[str]:
        return [f"It may call {', '.join(self.tools)}."]


@asynccontextmanager
async def client_of_tools(
    backend: ScriptedBackend, *tools: Tool, **config: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """Serve a scripted backend with these tools; gives a client and the service."""

    @asynccontextmanager
    async def open_registry(_: object) -> AsyncIterator[ToolRegistry]:
        yield ToolRegistry([FixedTools.of(tools)])

    with mock.patch("trioserve.server.server.open_registry", open_registry):
        async with client_and_service(backend, tools=("all",), **config) as (client, service):
            yield client, service
