"""An EAGLE-3 head for a model, trained on what the model writes.

`outputs` has the model answer questions and keeps what it computes, `train` teaches a head to guess
the model's next tokens from that, and `export` writes the head as a GGUF file.
"""

from __future__ import annotations


def layers_of(n_layer: int) -> tuple[int, int, int]:
    """Return the layers whose input a head reads: early, in the middle, and late."""
    return 2, n_layer // 2, n_layer - 1
