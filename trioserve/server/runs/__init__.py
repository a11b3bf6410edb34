"""Runs: answers for which the server runs the tools that the model calls.

`loop` lets the model answer, step after step, and `calls` runs what it calls. `run` has what a
caller holds, and `events` what it reads; `params` says what a run may do.
"""
