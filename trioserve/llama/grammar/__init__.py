"""Grammars compiled by llguidance, which computes the tokens that may come next.

`compiler` compiles them, with `gbnf` for grammars in that notation and `trial` for what may take
long. A `matcher` follows one output through a grammar, and has its masks made by a pool of threads.
`tokens` is the vocabulary as all of them need it.
"""
