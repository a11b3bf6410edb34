"""The official MCP client reaches a server through the proxy, as a page does."""

from __future__ import annotations

import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import TextContent

from tests.support.http_server import serving, serving_script

#: The SDK's client leaves its streams to the garbage collector, which closes them.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Async generator 'httpcore2:ResourceWarning",
    "ignore:Async generator 'httpx2:ResourceWarning",
)


class ThroughProxy(httpx2.AsyncHTTPTransport):
    """Sends requests as llama-server's page does: the address in the query, headers renamed."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.methods: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.methods.append(request.method)
        named = {
            f"x-llama-server-proxy-header-{name}": value
            for name, value in request.headers.items()
            if name not in ("host", "content-length", "connection")
        }
        return await super().handle_async_request(
            httpx2.Request(
                request.method,
                httpx2.URL(f"{self.url}/cors-proxy", params={"url": str(request.url)}),
                headers=named,
                content=await request.aread(),
            )
        )


def server() -> MCPServer:
    made = MCPServer("remote")

    @made.tool()
    async def weather(city: str, context: Context) -> str:
        await context.report_progress(1, 2, "looking")
        return f"It rains in {city}."

    return made


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_tool_is_called(as_json: bool) -> None:
    seen = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(message)

    hosts = ("127.0.0.1:*",)
    async with (
        serving(server().streamable_http_app(json_response=as_json)) as remote,
        serving_script(ui_mcp_proxy=True, ui_mcp_proxy_hosts=hosts) as (url, _),
    ):
        transport = ThroughProxy(url)
        async with (
            httpx2.AsyncClient(transport=transport, timeout=60) as client,
            streamable_http_client(f"{remote}/mcp", http_client=client) as (read, write),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["weather"]
            result = await session.call_tool(
                "weather", {"city": "Paris"}, progress_callback=on_progress
            )
    assert result.content == [TextContent(type="text", text="It rains in Paris.")]
    assert seen == ([] if as_json else ["looking"])
    assert {"GET", "POST", "DELETE"} <= set(transport.methods)
