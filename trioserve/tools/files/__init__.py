"""The files that built-in tools read and write: on this machine, inside a fence.

`store` says what a tool needs of files, wherever they are; a runtime has a store of its own.
`host` is that of this machine, `walk` goes through directories, `ignored` knows what .gitignore
says, and `patterns` has globs and regular expressions that take no more than linear time.
"""
