"""Runs: chat answers with tools. The server runs the tools that the model calls.

`loop` alternates between answers and calls of tools. `run` has the object that a caller holds,
`events` its events, and `params` the limits of a run.
"""
