"""From logits to a token: sampler chains, a shortlist of candidates for them, probabilities."""
