"""How the bundled model's eyes are made: drawings, the encoder, its training."""
