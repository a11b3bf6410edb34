"""Images and sound: the projector, which makes of them what the model takes in place of tokens.

This is llama.cpp's libmtmd. `library` has its functions, and `header` checks the file of a
projector before it reaches C. `chunks` cuts images and sound for the model, `encoding` ends a run
that nobody waits for, `projector` puts these together, and `decoding` has the batch for what was
encoded.
"""
