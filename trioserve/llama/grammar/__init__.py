"""Grammars compiled by llguidance, which says which tokens may come next.

`compiler` compiles them; `json_schema`, `gbnf` and `tools` turn each kind into what llguidance
takes. A `matcher` follows one output through a grammar, and a `lazy` one waits for triggers first.
A `pool` of threads makes the `masks`. `tokens` is the vocabulary as all of them need it.
"""
