"""Measuring servers: `trioserve bench` and `trioserve tune`, and what `benchmarks/` shares with them.

`client` sends a request and notes its times, `speed` makes a measurement of several, `report` shows
what came of them, and `tuning` searches for the best flags. `plot` draws, and `stats` sums up.
"""
