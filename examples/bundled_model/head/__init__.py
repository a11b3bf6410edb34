"""An EAGLE-3 head for a model, trained on what the model writes.

`outputs` has the model answer questions and keeps what it computes, `train` teaches a head to guess
the model's next tokens from that, and `export` writes the head as a GGUF file.
"""
