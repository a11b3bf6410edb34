"""The draft model: a small model that guesses what the large one says next.

`loading` loads it and checks that it fits the other, `texts` keeps its KV cache in step with the
slots, and `drafter` makes the guesses.
"""
