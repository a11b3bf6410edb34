"""Making the bundled model's eyes: drawings, the encoder, its training."""
