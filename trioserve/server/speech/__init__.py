"""Speech: texts are cut into pieces, spoken by the speech model, and encoded as they come."""
