"""OpenAI's APIs: chats, completions, embeddings, and `responses`."""
