"""Files that requests bring along: read or fetched, and decoded in child processes."""
