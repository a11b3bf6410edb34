"""A program that transcribes recordings with faster-whisper, for the process that has started it.

It imports nothing of trioserve but `inside`, whose folder is its second argument, so that any
Python that has faster-whisper can run it.

Its first argument is JSON: ``model``, a directory or a name; ``n_threads``; ``offline``. A job
comes as a frame of JSON and one of samples (float32, 16,000 a second). It tells what happens in
frames of JSON: ``languages`` when the model is loaded, then ``language``, ``segment`` and
``words``, ``done`` or ``error``. It ends when the socket does, in the middle of a job, too.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.children import inside
else:
    sys.path.append(sys.argv[2])
    import inside

#: The fields of a segment.
_NAMES = ("text", "start", "end", "tokens", "temperature", "avg_logprob", "no_speech_prob")

Tell = Callable[..., None]
Job = tuple[dict[str, Any], bytes]


def main() -> int:
    """Load the model, and do jobs until the socket ends."""
    parent = inside.Parent()

    def tell(**event: Any) -> None:
        parent.send(json.dumps(event).encode())

    settings = json.loads(sys.argv[1])
    try:
        from faster_whisper import WhisperModel

        model = WhisperModel(
            settings["model"],
            cpu_threads=settings["n_threads"],
            local_files_only=settings["offline"],
        )
    except Exception as error:  # report any error to the parent process
        tell(error=f"{type(error).__name__}: {error}")
        return 1
    tell(languages=model.supported_languages)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(parent, jobs), daemon=True).start()
    while True:
        fields, samples = jobs.get()
        try:
            _transcribe(model, fields, samples, tell)
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")


def _read_jobs(parent: inside.Parent, jobs: queue.SimpleQueue[Job]) -> None:
    while (fields := parent.receive()) is not None and (samples := parent.receive()) is not None:
        jobs.put((json.loads(fields), samples))
    os._exit(0)  # the parent has gone


def _transcribe(model: Any, fields: dict[str, Any], samples: bytes, tell: Tell) -> None:
    import numpy as np

    segments, info = model.transcribe(np.frombuffer(samples, np.float32), **fields)
    tell(language=info.language)
    for segment in segments:
        words = [
            {"text": word.word, "start": word.start, "end": word.end}
            for word in segment.words or ()
        ]
        tell(segment={name: getattr(segment, name) for name in _NAMES}, words=words)
    tell(done=True)


if __name__ == "__main__":
    sys.exit(main())
