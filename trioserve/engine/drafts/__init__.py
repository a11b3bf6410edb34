"""Drafts: guesses of the next tokens, which one tick checks together (speculative decoding).

`drafts` asks the drafters before each tick and tells them what became of their guesses.
"""
