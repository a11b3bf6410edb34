"""Media files of requests: read or fetched, and decoded in child processes."""
