"""The shared part of all routes: request bodies, replies, errors, callers, server-sent events."""
