"""Where the built-in tools run: on this machine, in a container, or on another host.

A `Runtime` runs commands, and has a `FileStore` for the tools that read and write files. `host` is
this machine, inside a fence; `isolate` has what containers and other hosts have in common, which
are reached by a program (`container`, `ssh`). `runtimes` finds the one that a call is to run in.
"""
