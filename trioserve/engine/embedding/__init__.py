"""The engine for embeddings: texts of several requests, packed into one batch a tick."""
