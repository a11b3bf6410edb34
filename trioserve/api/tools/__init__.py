"""The routes of tools: what the server runs for clients, and the way of pages to MCP servers."""
