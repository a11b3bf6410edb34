"""Measuring trioserve, and any other server that speaks the same HTTP, from the outside.

`compare` starts trioserve and llama-server itself and puts
them through the scenarios of the `catalogue`; `proof` runs the whole table of `rows`, each with its
target; `compat` compares answers, not speed; `pair` has a draft model; `gguf_maker` writes models
of any size to do it with; `selfcheck` measures the load generator. The situations are in
`scenarios`, `chats`, `structured`, `busy` and `cancel`. Below them: `http1` reads responses,
`driver` takes many clients through their `plan`s on one selector, `wire` knows the bodies of the
two APIs, `targets` which servers may be measured, `harness` starts and stops them, `stats`,
`report` and `pictures` make numbers, tables and pictures, with `trioserve.bench`. `steps` measures
the engine without a model.
"""
