"""Measures servers, for `trioserve bench` and `trioserve tune`; `benchmarks/` shares some of it.

`client` sends a request and notes its times, `speed` makes a measurement of several, `report` shows
the results, and `search` looks for the best flags. `plot` draws, and `stats` sums up.
"""
