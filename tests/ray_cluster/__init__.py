"""The Serve application on a cluster of several nodes, under load, with processes that are killed.

`make test-ray` runs this: it installs Ray, and the other tests do without it. Ray runs in a process
of its own (`program`), so that its threads and signal handlers are not those of the tests.
"""
