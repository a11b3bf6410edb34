"""Many models from one address: a child process for each, and requests on their way to it."""
