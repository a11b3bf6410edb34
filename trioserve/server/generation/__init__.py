"""Requests to an engine: completions, chats, embeddings and saved slots."""
