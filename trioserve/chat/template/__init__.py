"""Chat templates: chosen, compiled once, and rendered in a sandbox."""
