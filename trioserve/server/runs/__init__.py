"""Runs: answers for which the server runs the tools that the model calls.

`run` has what a caller holds, and `events` what it reads from the `feed`. `opening` begins a run.
`loop` lets the model answer, step after step, and `calls` runs what it calls: `decisions` has what
people say about that, and `fitting` cuts what is too long for the model. `registry` knows the runs
of a server.
"""
