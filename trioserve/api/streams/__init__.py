"""Streams that outlive the request that began them, for a browser's `EventSource`."""
