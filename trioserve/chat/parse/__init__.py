"""Parsers that split output into content, reasoning and tool calls while it streams."""
