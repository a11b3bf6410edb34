"""Images and sound: the projector turns them into embeddings, which replace tokens.

This is llama.cpp's libmtmd. `library` has its functions, and interrupts an abandoned encoding.
`chunks` cuts images and sound for the model, and `projector` combines these.
"""
