"""Grammars for answers with tool calls, generated from the descriptions in `formats`."""
