"""Making the bundled model: corpus, tokenizer, training, export, evaluation.

Nothing here is imported by the server. The scripts need torch, tokenizers,
gguf, numpy and jinja2; the evaluation needs llama-cpp-python as well.
``README.md`` lists the commands.
"""
