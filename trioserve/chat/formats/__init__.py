"""How families of models write reasoning and tool calls, as data."""
