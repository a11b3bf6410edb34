"""llama-server's own routes, and those about the server itself."""
