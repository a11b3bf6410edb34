"""The files that built-in tools read and write: on this machine, or elsewhere.

`store` says what a tool needs of files, wherever they are; a runtime has a store of its own.
`host` is that of this machine, `isolate` that of a place which only commands reach. `patterns` has
globs and regular expressions that take no more than linear time.
"""
