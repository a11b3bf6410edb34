"""From logits to a token: sampler chains, the shortlist before them, and probabilities."""
