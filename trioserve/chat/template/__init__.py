"""Chat templates: found or chosen, compiled once, rendered in a sandbox."""
