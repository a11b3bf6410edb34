"""A chat in the terminal: the conversation and its commands, and how messages are typed."""
