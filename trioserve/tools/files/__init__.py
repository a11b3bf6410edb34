"""The files that built-in tools read and write: on this machine, or elsewhere.

`store` says what a tool needs of files in any place; each runtime has a store.
`host` is that of this machine, `isolate` that of a place which only commands reach. `patterns` has
globs and regular expressions that take no more than linear time.
"""
