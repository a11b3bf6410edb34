"""Grammars: which tokens may come next, by llguidance."""
