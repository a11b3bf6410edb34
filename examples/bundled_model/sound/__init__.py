"""How the bundled model's ears are made: spoken digits, the encoder, its training."""
