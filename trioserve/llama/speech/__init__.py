"""Models that speak: the rows of texts, the frames that are made of them, and their sound.

`speaker` has the model and its context. `pocket` and `qwen` say how the two families of models want
a text and turn outputs into frames, with the functions of libmtmd that `generator` wraps.
`token_rows` reads what stands for tokens from the model's file.
"""
