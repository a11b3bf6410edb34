"""Drafts: guesses of the next tokens, which one step checks together (speculative decoding).

`drafts` asks the drafters before each step, checks their guesses afterwards, and stops drafting
while it does not pay. `lengths` chooses the lengths of drafts by what steps cost.
`ngrams` guesses from earlier texts.
"""
