"""Loading, monitoring, unloading and reloading the model of a server."""
