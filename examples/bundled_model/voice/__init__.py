"""Making the bundled voice: recorded words, sound as latents, text into latents, two files."""
