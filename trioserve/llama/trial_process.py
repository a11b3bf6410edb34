"""Loads a model in a process that may die, and tries its files out there.

``python -m trioserve.llama.trial_process`` reads a pickled `Config` from standard input, and writes
lines of JSON: the progress, and what is wrong. `run` starts it; not on Windows.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import IO, Any, TypeAlias

import attrs

from trioserve.config import Config
from trioserve.config.flags import SECRET_VARIABLES
from trioserve.errors import ModelLoadError
from trioserve.log import get_logger
from trioserve.models import resolve

Progress: TypeAlias = Callable[[float], bool]

_log = get_logger("trioserve")

#: Seconds without progress after which the process is ended. A decode on a slow disk may take long.
_PATIENCE = 600.0
_POLL = 0.1
_READ = 2**16


def run(config: Config, progress: Progress | None = None) -> bool:
    """Load the model in a process, and try it out there. Blocks as long as loading does.

    `progress` is called as by `trioserve.llama.load`, but every tenth of a second. Returns whether
    the model was tried: it is not where no such process can run.

    Raises:
        ModelLoadError: the files cannot be used, or end the process; or `progress` cancelled.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__]
    with tempfile.TemporaryFile() as order, tempfile.TemporaryFile() as log:
        order.write(pickle.dumps(_without_secrets(config)))
        order.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=order, stdout=subprocess.PIPE, stderr=log, env=_environment()
            )
        except OSError as error:
            _log.warning("the files are not tried first", reason=error.strerror)
            return False
        with process:
            said = _follow(process, config, progress)
        return _is_tried(config, process.returncode, said, log)


def _environment() -> dict[str, str]:
    """The variables, except for secrets: a file that takes the process over has no use for them."""
    return {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}


def _without_secrets(config: Config) -> Config:
    """Set what clients, tools and the network concerns to its default."""
    others: dict[str, Any] = {
        field.name: field.default
        for field in attrs.fields(Config)
        if field.metadata.get("group") in ("Server", "Network", "Tools")
    }
    return attrs.evolve(config, **others, hf_token=None)


def _follow(
    process: subprocess.Popen[bytes], config: Config, progress: Progress | None
) -> dict[str, Any]:
    """Report progress until the process closes its output; returns all that it said.

    Ends the process when this raises, or when it says nothing for too long.
    """
    said: dict[str, Any] = {}
    try:
        for line in _lines(process):
            with suppress(ValueError):  # an empty one, or one with names that were too long for it
                said |= json.loads(line)
            if progress is not None and not progress(said.get("progress", 0.0)):
                raise ModelLoadError(f"Loading the model {resolve(config.model)} was cancelled.")
    except BaseException:
        process.kill()
        raise
    return said


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield lines, and an empty one whenever there is none for a while."""
    assert process.stdout is not None
    rest, heard_at = b"", monotonic()
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        while monotonic() < heard_at + _PATIENCE:
            if not selector.select(_POLL):
                yield b""
                continue
            heard_at = monotonic()
            more = os.read(process.stdout.fileno(), _READ)
            if not more:
                return
            *lines, rest = (rest + more).split(b"\n")
            yield from lines
    process.kill()


def _is_tried(config: Config, code: int, said: dict[str, Any], log: IO[bytes]) -> bool:
    """Raise ModelLoadError unless all went well, or the trial itself was at fault."""
    if (refusal := said.get("refused")) is not None:
        raise ModelLoadError(refusal)
    if code == 0:
        return True
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    if code > 0:  # not the files: Python could not run it
        _log.warning("the files are not tried first", code=code, reason=" ".join(lines[-1:]))
        return False
    name = signal.Signals(-code).name
    files = said.get("died", f"the model file {resolve(config.model)}")
    why = next((match[1] for match in map(_REASON.search, reversed(lines)) if match), "")
    if name == "SIGKILL":
        why = "for want of memory, or because it took too long"
    raise ModelLoadError(
        f"{files[0].upper()}{files[1:]} cannot be used: llama.cpp ends the process that loads it "
        f"({name}{why and ', '}{why})."
    )


#: ggml says why it ends the process after the file and the line of its sources.
_REASON = re.compile(r"([\w.-]+\.\w+:\d+: .*)")


# -- the process


def _main() -> None:
    config = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    descriptor = os.dup(1)
    os.dup2(2, 1)  # llama.cpp may print
    _give_way()
    from trioserve.llama import last_word, load_here, trial

    last_word.install(descriptor, lambda files: json.dumps({"died": files}))

    def tell(**fields: Any) -> bool:
        os.write(descriptor, json.dumps(fields).encode() + b"\n")
        return True

    # Mapped, a file is read by what computes with it, once, and the server finds it in memory.
    mode = config.load_mode if config.load_mode == "dio" else "mmap"
    config = attrs.evolve(config, load_mode=mode)
    try:
        with closing(load_here(config, progress=lambda share: tell(progress=share))) as backend:
            trial.try_out(backend)
    except ModelLoadError as error:
        tell(refused=error.message)


def _give_way() -> None:
    """Leave no core file, and be the first process to go where memory is short."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _main()
