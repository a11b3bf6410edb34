"""What all routes share: the connection, the body, errors, keys, and server-sent events."""
