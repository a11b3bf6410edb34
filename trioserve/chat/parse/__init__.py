"""Takes generated text apart, piece by piece, into content, reasoning and tool calls."""
