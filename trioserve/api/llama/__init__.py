"""llama-server's own routes, and the routes about the server itself: health, slots, metrics."""
