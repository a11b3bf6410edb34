"""An MCP server with one tool, written with the official SDK: ``pip install ".[mcp]"``.

A server is started with it as one of its MCP servers, and its tool is then ``weather_get_weather``:

    trioserve --mcp-servers-json '{"mcpServers": {"weather": {"command": "python",
        "args": ["examples/mcp_weather.py"]}}}'
"""

from __future__ import annotations

import json
from zlib import crc32

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

CONDITIONS = ("sunny", "cloudy", "rainy", "windy")

server = MCPServer("weather")


@server.tool(annotations=ToolAnnotations(read_only_hint=True), structured_output=False)
def get_weather(city: str) -> str:
    """Get the weather for a city."""
    temperature, condition = 21, "sunny"
    if city.strip().lower() != "paris":
        number = crc32(city.strip().lower().encode())  # always the same for the same city
        temperature, condition = number % 35 - 5, CONDITIONS[number % len(CONDITIONS)]
    return json.dumps({"temperature": temperature, "condition": condition})


if __name__ == "__main__":
    server.run("stdio")
