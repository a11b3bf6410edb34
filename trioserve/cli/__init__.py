"""The command ``trioserve``."""
