"""Turns messages into a prompt, and what the model writes into a message.

`template` renders messages through the model's own template, which runs in a sandbox. `formats`
describes how each family of models writes reasoning and tool calls. By that description `parse`
takes apart what the model writes, piece by piece, and `grammar` holds the model to it.
"""
