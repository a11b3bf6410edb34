"""The prefix cache: which KV sequence has which tokens, in the KV cache and in RAM."""
