"""The Serve application on a cluster of several nodes, under load, with processes that are killed.

`make test-ray` runs this: it installs Ray, which the other tests do not need. Ray runs in a
separate process (`program`), which keeps its threads and signal handlers away from the tests.
"""
