"""What all routes share: connections, request bodies, errors, API keys and server-sent events."""
