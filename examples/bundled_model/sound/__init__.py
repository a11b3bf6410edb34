"""Making the bundled model's ears: spoken digits, the encoder, its training."""
