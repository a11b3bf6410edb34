"""The tools that are built in, with llama-server's names, arguments, limits and words.

Those with files work on a `FileStore`: `read`, `find`, `grep`, `write` and `edit`.
"""
