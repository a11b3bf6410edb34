"""Drafts: guesses of the next tokens, which one step checks together (speculative decoding).

`drafts` asks the drafters before each step and learns what became of their guesses. `lengths` says
how long drafts are to be, from what `costs` knows of steps; `balance` stops them where they lose.
`ngrams` guesses from texts that were seen before.
"""
