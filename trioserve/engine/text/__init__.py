"""From sampled tokens to text that may be shown: whole characters, stop strings, reasoning."""
