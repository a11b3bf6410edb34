"""Descriptions, as data, of how each family of models writes reasoning and tool calls."""
