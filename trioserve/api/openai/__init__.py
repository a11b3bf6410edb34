"""The routes of OpenAI's APIs: chats, completions, embeddings and, in `responses`, Responses."""
