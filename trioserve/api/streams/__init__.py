"""Streams that can be resumed: what begins them, and the routes that read and stop them."""
