"""A program that transcribes recordings with faster-whisper, for the process that has started it.

It imports nothing of trioserve, so that any Python that has faster-whisper can run it.

Its argument is JSON: ``model``, a directory or a name; ``n_threads``; ``offline``. A job comes as a
line of JSON on stdin, followed by `n_bytes` of samples (float32, 16,000 a second). What happens is
told on stdout, in lines of JSON with one name each: ``ready``, ``language``, ``segment``, ``done``
and ``error``. It ends when stdin does, in the middle of a job, too.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

Tell = Callable[..., None]
Job = tuple[dict[str, Any], bytes]


def main() -> int:
    """Load the model, and do jobs until stdin ends."""
    tell = _take_stdout()
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
    tell(ready={"languages": model.supported_languages})
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    while True:
        fields, samples = jobs.get()
        try:
            _transcribe(model, fields, samples, tell)
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")


def _take_stdout() -> Tell:
    """Reserve stdout for events; the output of libraries goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    return tell


def _read_jobs(jobs: queue.SimpleQueue[Job]) -> None:
    while line := sys.stdin.buffer.readline():
        fields = json.loads(line)
        samples = sys.stdin.buffer.read(fields.pop("n_bytes"))
        jobs.put((fields, samples))
    os._exit(0)  # the parent has gone


def _transcribe(model: Any, fields: dict[str, Any], samples: bytes, tell: Tell) -> None:
    import numpy as np

    segments, info = model.transcribe(np.frombuffer(samples, np.float32), **fields)
    tell(language=info.language)
    for segment in segments:
        tell(
            segment={
                "text": segment.text,
                "start": segment.start,
                "end": segment.end,
                "tokens": segment.tokens,
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "no_speech_prob": segment.no_speech_prob,
                "words": [
                    {"text": word.word, "start": word.start, "end": word.end}
                    for word in segment.words or ()
                ],
            }
        )
    tell(done=True)


if __name__ == "__main__":
    sys.exit(main())
