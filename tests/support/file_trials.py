"""Loads damaged files, each in a separate process: ``python -m tests.support.file_trials``.

    python -m tests.support.file_trials FOLDER model:0:391 adapter:0:79 projector:0:186

For each file it writes a line of JSON: what the file is, its fault, and the outcome.
This process imports everything and forks, so that a file takes milliseconds; it has no threads.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from tests.support.damaged_files import Damaged, damaged
from tests.support.engine_events import take_events
from tests.support.media_models import random_image, random_sound
from tests.support.speech_models import recording
from trioserve.config import Config
from trioserve.engine import DecodeMaximal, EmbeddingEngine, Engine, SpeechEngine
from trioserve.errors import ModelLoadError, TrioServeError
from trioserve.llama import load_here, room, trial
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.embedding import LlamaEmbedder
from trioserve.llama.speech.speaker import LlamaSpeaker
from trioserve.types import (
    CacheRoot,
    DecodedMedia,
    EmbeddingTask,
    GenerationParams,
    Prompt,
    SamplingParams,
    SpeechTask,
    Task,
)

#: The outcomes. The last is a failure: the trial let a file through that ends a server.
REFUSED_BY_HEADER = "refused by the header"
REFUSED_BY_LLAMA = "refused by llama.cpp"
DIED_IN_TRIAL = "died in the trial"
ANSWERS = "loads and answers"
DIED_IN_SERVICE = "died in service"
OUTCOMES = (REFUSED_BY_HEADER, REFUSED_BY_LLAMA, DIED_IN_TRIAL, ANSWERS, DIED_IN_SERVICE)

#: The limit of a file. A process that waits for something for ever takes no processor time.
_CPU_SECONDS, _SECONDS, _MEMORY = 30, 600.0, 6 * 2**30

_SETTINGS: dict[str, Any] = {"threads": 1, "ctx_size": 512, "parallel": 2}


def outcomes(folder: Path, kind: str, seeds: range) -> Iterator[dict[str, Any]]:
    """Write damaged files, load each, and say what came of it."""
    for seed in seeds:
        one = damaged(kind, seed, folder)
        outcome, why = _planned(one)
        if not outcome:
            outcome, why = _forked(one, folder / "stderr.txt")
        one.path.unlink()
        yield {"kind": kind, "seed": seed, "fault": one.fault, "outcome": outcome, "why": why}


def _planned(one: Damaged) -> tuple[str, str]:
    """Read the header, as each load does first: that happens in the server's process."""
    try:
        room.plan(Config(**_SETTINGS, **one.settings))
    except ModelLoadError as error:
        return REFUSED_BY_HEADER, error.message
    return "", ""


def _forked(one: Damaged, log: Path) -> tuple[str, str]:
    """Load it in a child; returns what came of it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        _become(one, write_end, log)
    os.close(write_end)
    said = _read(read_end, child)
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return (ANSWERS, "") if said == "served" else (REFUSED_BY_LLAMA, said)
    lines = log.read_text(errors="replace").strip().splitlines()
    last = next((line for line in lines if "GGML_ASSERT" in line or "ggml_abort" in line), "")
    why = f"{signal.Signals(-code).name if code < 0 else code}: {last or ' '.join(lines[-2:])}"
    return DIED_IN_SERVICE if said == "tried" else DIED_IN_TRIAL, why


def _read(read_end: int, child: int) -> str:
    """Read the last line of a child; ends it after some time."""
    said, deadline = b"", time.monotonic() + _SECONDS
    os.set_blocking(read_end, False)
    while time.monotonic() < deadline:
        try:
            more = os.read(read_end, 4096)
        except BlockingIOError:
            time.sleep(0.005)
            continue
        if not more:
            break
        said += more
    else:
        os.kill(child, signal.SIGKILL)
    os.close(read_end)
    return said.decode().strip().rpartition("\n")[2]


def _become(one: Damaged, descriptor: int, log: Path) -> None:
    """Load and answer, and exit."""
    code = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            backend = load_here(Config(**_SETTINGS, **one.settings))
            trial.try_out(backend)
            os.write(descriptor, b"tried\n")
            _serve(backend)
            os.write(descriptor, b"served\n")
        except ModelLoadError as error:
            os.write(descriptor, error.message.encode())
        code = 0
    except BaseException as error:
        sys.stderr.write(f"\n{error!r}\n")
        sys.stderr.flush()
    os._exit(code)


# -- as requests would


def _serve(backend: LlamaBackend | LlamaEmbedder | LlamaSpeaker) -> None:
    """Compute what requests ask for: long and short prompts together, media, adapters, voices."""
    if isinstance(backend, LlamaSpeaker):
        speech = SpeechEngine(backend, lambda: None)
        for id_, (text, seconds) in enumerate(
            (("One two.", 0.0), ("The cat sat on the mat. " * 4, 1.0), ("Hello", 2.7))
        ):
            try:
                voice = backend.take_voice(recording(seconds)) if seconds else None
                pieces = [backend.tokenize(text), backend.tokenize("Two.")]
                spoken = SpeechTask(id=id_, pieces=pieces, voice=voice, seed=id_, max_frames=80)
                speech.check(spoken)
            except TrioServeError:
                continue
            speech.submit(spoken)
        _run(speech)
        return
    if isinstance(backend, LlamaEmbedder):
        engine: Any = EmbeddingEngine(backend, lambda: None)
        texts = [
            backend.vocab.tokenize(text) for text in ("panda", "the cat sits on the mat. " * 4)
        ]
        engine.submit(EmbeddingTask(0, [text[: backend.n_ctx_seq - 2] for text in texts]))
        _run(engine)
        return
    engine = Engine(backend, DecodeMaximal(), lambda: None, cache_ram=2**20)
    for id_, task in enumerate(_tasks(backend)):
        engine.submit(Task(id_, task[0], GenerationParams(max_tokens=12), root=task[1]))
    _run(engine)
    engine.submit(Task(99, Prompt(backend.vocab.tokenize("Once upon")), _GREEDY))
    _run(engine)


_GREEDY = GenerationParams(max_tokens=4, sampling=SamplingParams(temperature=0.0))


def _tasks(backend: LlamaBackend) -> Iterator[tuple[Prompt, CacheRoot]]:
    tokenize = backend.vocab.tokenize
    for text in (
        "Once upon a time",
        "The bear \U0001f43b sat. " * 12,
        "1 + 1 = ",
        "Once upon a hill",
    ):
        yield Prompt(tokenize(text)), CacheRoot()
    for i in range(len(backend.adapters)):
        for scale in (1.0, 0.5):
            yield Prompt(tokenize("Once upon a time")), CacheRoot(adapters=((i, scale),))
    if (projector := backend.projector) is None:
        return
    media: list[DecodedMedia] = []
    if projector.sees:
        media += [random_image(), random_image(200, 90), random_image(30, 300)]
    if projector.hears:
        media += [random_sound(seconds) for seconds in (0.1, 1.0, 4.0)]
    for one in media:
        try:
            yield projector.prepare(["Look: ", one, " So"], add_special=True), CacheRoot()
        except TrioServeError:
            continue  # the client would get a 400


def _run(engine: Any) -> None:
    """Run until all is done, or the engine has failed, as a server would have noticed."""
    for _ in range(2000):
        try:
            work_left = engine.step()
        except TrioServeError:
            return
        take_events(engine)
        if not work_left:
            return
        if getattr(engine, "encoder", None) is not None:
            time.sleep(0.001)


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run this module in a process, which may fork as this one may not; returns what it says."""
    command = [sys.executable, "-m", __name__, str(folder), *arguments]
    environ = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Load the files of the command line."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    folder = Path(sys.argv[1])
    for argument in sys.argv[2:]:
        kind, first, count = argument.split(":")
        for one in outcomes(folder, kind, range(int(first), int(first) + int(count))):
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
