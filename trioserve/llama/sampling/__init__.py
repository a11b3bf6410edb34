"""From logits to a token: sampler chains, a shortlist of candidates for them, probabilities.

`offload` lets llama.cpp run a chain on the device that computes the logits.
"""
