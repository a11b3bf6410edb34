"""The command ``trioserve``: reads flags, serves until a signal, and returns an exit code."""
