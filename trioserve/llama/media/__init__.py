"""Images and sound: the projector, which makes of them what the model takes in place of tokens.

This is llama.cpp's libmtmd. `library` has its functions, and ends an encoding that nobody waits
for. `chunks` cuts images and sound for the model, and `projector` puts these together.
"""
