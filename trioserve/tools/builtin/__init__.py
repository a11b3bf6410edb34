"""The tools that are built in, with llama-server's names, arguments, limits and words.

`tools` has those that a configuration switches on. `file_tools` and `search` work on a `FileStore`,
`commands` in a `Runtime`; `diffs` shows people what a tool changes.
"""
