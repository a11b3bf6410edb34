"""Grammars of answers that may hold tool calls, made of the descriptions of call formats."""
