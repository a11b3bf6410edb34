"""Builds the prompt of a task from a request's text, chat and media."""
