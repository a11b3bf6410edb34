"""A mixed load on a real server for some minutes, and whether the server is the same after it."""
