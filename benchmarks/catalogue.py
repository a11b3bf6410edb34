"""The scenarios by the names that `compare --scenarios` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.busy import Beside
from benchmarks.cancel import Cancel
from benchmarks.chats import Chats
from benchmarks.everyday import Editor, Embeddings, Turns
from benchmarks.scenarios import (
    Connections,
    LongPrompt,
    Scenario,
    Settings,
    SharedPrefix,
    Streams,
)
from benchmarks.structured import Structured

#: A name, and what makes its scenarios from the settings and the numbers of clients asked for.
SCENARIOS: Mapping[str, Callable[[Settings, Sequence[int]], Sequence[Scenario]]] = {
    "streams": lambda settings, clients: [
        Streams(settings, count, settings.requests) for count in clients
    ],
    "queue": lambda settings, clients: [Streams(settings, 50, 1)],
    "shared-prefix": lambda settings, clients: [SharedPrefix(settings)],
    "chats": lambda settings, clients: [Chats(settings)],
    "long-prompt": lambda settings, clients: [LongPrompt(settings)],
    "cancel": lambda settings, clients: [
        Cancel(settings, "prefill"),
        Cancel(settings, "decode"),
    ],
    "structured": lambda settings, clients: [Structured(settings)],
    "busy": lambda settings, clients: [Beside(settings)],
    "turns": lambda settings, clients: [Turns(settings, count) for count in clients],
    "editor": lambda settings, clients: [Editor(settings, count) for count in clients],
    "embeddings": lambda settings, clients: [Embeddings(settings, count) for count in clients],
    "idle": lambda settings, clients: [Connections(settings)],
    "waiting": lambda settings, clients: [Connections(settings, waiting=True)],
}
