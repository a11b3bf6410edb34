"""Chats that are posted first and streamed later, to a browser's `EventSource`."""
