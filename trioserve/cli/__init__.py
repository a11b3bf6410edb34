"""The command ``trioserve``: flags in, a server until a signal comes, an exit code out."""
