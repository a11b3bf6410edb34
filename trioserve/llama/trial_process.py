"""Loads a model in a process that may die, and tries its files out there.

``python -m trioserve.llama.trial_process`` gets a pickled `Config`, and whether only an estimate is
wanted. It answers with `Loaded`, `Measured` and `Refused`. `run` and `measure` start it; not on
Windows.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any, TypeAlias

import attrs
import msgspec

from trioserve.children import inside
from trioserve.children.child import Child, ChildError, how
from trioserve.config import Config
from trioserve.config.checks import without_drafts
from trioserve.config.flags import SECRET_VARIABLES
from trioserve.errors import ModelLoadError
from trioserve.llama import devices, estimate, library
from trioserve.llama.estimate import Estimate
from trioserve.llama.machine import free_memory
from trioserve.log import get_logger
from trioserve.models import resolve
from trioserve.models.gguf import check_file
from trioserve.models.speech import resolve_speech
from trioserve.models.tried import LoadedFiles

Progress: TypeAlias = Callable[[float], bool]

_log = get_logger("trioserve")

#: Seconds without progress after which the process is ended. A decode on a slow disk may take long.
_PATIENCE = 600.0
_POLL = 0.1

#: Tokens of the context in which an adapter is tried.
_TRIAL_CONTEXT = 512

#: Bytes of one of its messages, and of the end of its log that is read.
_MAX_MESSAGE = _MAX_LOG = 2**16


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The share of the weights that is loaded."""

    share: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the files cannot be used: a sentence."""

    reason: str


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The fields of an `Estimate`."""

    weights: int
    cache: int
    compute: int
    n_ctx: int


_messages = msgspec.msgpack.Decoder(Loaded | Refused | Measured)


def run(config: Config, progress: Progress | None = None) -> bool:
    """Load the model in a process, and try it out there. Blocks as long as loading does.

    `progress` is called as by `trioserve.llama.load`, but every tenth of a second. Returns whether
    the model was tried: it is not where no such process can run.

    Raises:
        ModelLoadError: the files cannot be used, or end the process; or `progress` cancelled.
    """
    return _answers(config, progress) is not None


def try_adapter(config: Config, path: Path) -> None:
    """Try an adapter that comes to a loaded model, if the file is new to this machine. Blocks.

    Raises:
        ModelLoadError: it cannot be used, was replaced meanwhile, or needs more than is free.
    """
    check_file(path)
    free = free_memory()
    if free is not None and path.stat().st_size > free:
        raise ModelLoadError(f"The LoRA adapter {path} is larger than the memory that is free.")
    config = attrs.evolve(
        without_drafts(config),
        lora=(f"{path}:1",),
        lora_init_without_apply=False,
        control_vector=(),
        ctx_size=_TRIAL_CONTEXT,
        parallel=1,
    )
    files = LoadedFiles.of(config, devices.versions())
    if files.are_known or not config.trial_load or config.rpc or sys.platform == "win32":
        return
    run(config)
    if files != LoadedFiles.of(config, devices.versions()):
        raise ModelLoadError(f"The LoRA adapter {path} was replaced while it was tried.")
    files.remember()


def measure(config: Config) -> Estimate:
    """Estimate the memory of a model, in a process if its files are new to this machine.

    Raises:
        ModelLoadError: the files cannot be used, or end the process.
        BackendMismatchError: the installed llama.cpp is not one we can use.
    """
    from trioserve.llama.speech.speaker import speech_config

    library.check_library()
    speech = resolve_speech(config)
    configs = [config] if speech is None else [config, speech_config(config, speech)]
    are_known = all(LoadedFiles.of(one, devices.versions()).are_known for one in configs)
    if sys.platform == "win32" or are_known:
        return estimate.measure(config)
    for answer in _answers(config, is_estimate=True) or ():
        if isinstance(answer, Measured):
            return Estimate(**msgspec.structs.asdict(answer))
    return estimate.measure(config)  # no such process can run


def _answers(
    config: Config, progress: Progress | None = None, *, is_estimate: bool = False
) -> list[Loaded | Measured] | None:
    """Run the process; returns what it has said, None if it cannot run."""
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__]
    answers: list[Loaded | Measured] = []
    with tempfile.TemporaryFile() as log:
        try:
            child = Child.spawn(command, env=_environment(), log=log, max_frame=_MAX_MESSAGE)
        except OSError as error:
            _log.warning("the files are not tried first", reason=error.strerror)
            return None
        # The exit code says more than an error does.
        with child, suppress(ChildError, msgspec.MsgspecError, ValueError):
            order = pickle.dumps((_without_secrets(config), is_estimate))
            child.send(order, monotonic() + _PATIENCE)
            _follow(child, config, answers, progress)
        return answers if _has_done_all(config, child.end(), log) else None


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
    child: Child, config: Config, answers: list[Loaded | Measured], progress: Progress | None
) -> None:
    """Collect answers and report progress until the process ends, or says nothing for too long.

    Raises:
        ModelLoadError: the files cannot be used, or `progress` cancelled.
        ChildError, MsgspecError, ValueError: it has ended, or sent something else.
    """
    share, heard_at = 0.0, monotonic()
    while monotonic() < heard_at + _PATIENCE:
        with suppress(TimeoutError):
            said = _messages.decode(child.receive(monotonic() + _POLL))
            if isinstance(said, Refused):
                raise ModelLoadError(said.reason)
            answers.append(said)
            heard_at = monotonic()
            if isinstance(said, Loaded):
                share = said.share
        if progress is not None and not progress(share):
            raise ModelLoadError(f"Loading the model {resolve(config.model)} was cancelled.")
    child.kill()


def _has_done_all(config: Config, code: int, log: IO[bytes]) -> bool:
    """Return False if the process itself was at fault. Raises ModelLoadError."""
    if code == 0:
        return True
    log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_LOG))
    lines = log.read().decode(errors="replace").strip().splitlines()
    if code > 0:  # not the files: Python could not run it
        _log.warning("the files are not tried first", code=code, reason=" ".join(lines[-1:]))
        return False
    name = how(code).removeprefix("was ended by ")
    files = next(
        (line.removeprefix(_AT_WORK) for line in reversed(lines) if line.startswith(_AT_WORK)),
        f"the model file {resolve(config.model)}",
    )
    why = next((match[1] for match in map(_REASON.search, reversed(lines)) if match), "")
    if name == "SIGKILL":
        why = "for want of memory, or because it took too long"
    raise ModelLoadError(
        f"{files[0].upper()}{files[1:]} cannot be used: llama.cpp ends the process that loads it "
        f"({name}{why and ', '}{why})."
    )


#: ggml says why it ends the process after the file and the line of its sources.
_REASON = re.compile(r"([\w.-]+\.\w+:\d+: .*)")

#: The beginning of the last line of the log, which names the files in use.
_AT_WORK = "a fault in native code ends the trial of "


# -- the process


def _main() -> None:
    parent = inside.Parent()
    order = parent.receive()
    if order is None:
        return
    parent.end_with_it()
    inside.lower("RLIMIT_CORE", 0)
    inside.go_first()
    from trioserve.llama import last_word, load_here, trial

    last_word.install(2, lambda files: _AT_WORK + files)

    def tell(message: Loaded | Refused | Measured) -> bool:
        parent.send(msgspec.msgpack.encode(message))
        return True

    config, is_estimate = pickle.loads(order)
    # Mapped, a file is read by what computes with it, once, and the server finds it in memory.
    mode = config.load_mode if config.load_mode == "dio" else "mmap"
    config = attrs.evolve(config, load_mode=mode)
    try:
        if is_estimate:
            tell(Measured(**attrs.asdict(estimate.measure(config))))
            return
        with closing(load_here(config, progress=lambda share: tell(Loaded(share)))) as backend:
            trial.try_out(backend)
    except ModelLoadError as error:
        tell(Refused(error.message))


if __name__ == "__main__":
    _main()
