"""`Server`: a model that answers requests, as long as an ``async with`` block runs.

A package of four parts, of which each is a class: the life of a server and its requests (`core`),
prompts (`text`), messages (`chat`), and texts as vectors (`vectors`).
"""

from __future__ import annotations

from trioserve.server.chat import Chats
from trioserve.server.embeddings import Vectors

__all__ = ["Server"]


class Server(Chats, Vectors):
    """A loaded model, ready for requests inside ``async with Server(config) as server:``.

    Entering loads the model in a worker thread. Leaving ends what still runs (its readers get a
    `ServerClosingError`), joins the inference thread and frees the memory; call `drain` before to
    let requests finish. Any Trio cancel scope around a call cancels its work in the engine.

    Args:
        config: what to load and how; the default is the bundled model.
        load: loads the model. The default loads a GGUF file with llama.cpp.
        drive: runs the engine. The default gives it a thread.

    Raises:
        ModelLoadError: on entry, when the model cannot be loaded.
        BridgeError: on entry, when the system has no descriptors left.
    """
