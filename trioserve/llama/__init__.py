"""The llama.cpp backend: typed wrappers that check arguments to C and free what C allocates.

Only this package imports llama_cpp.

`library` finds the C functions and takes llama.cpp's log lines. `model`, `vocab`, `context`,
`batch` and `adapters` wrap one kind of C object each. `sampler` chooses tokens, as far as `grammar`
allows them. `drafter` and `heads` guess what comes next. `devices` and `machine` describe the
hardware; `shape`, `fit` and `room` make a model fit its memory. `backend` combines them for the
engine, `embedding` for the embedding engine, and `speech` for the speech engine. `trial` computes
what requests will ask for, and where the files are new, `trial_process` does that in another
process, as for adapters that come later.
All arguments are checked before they reach C, because llama.cpp aborts the process on bad values.
Importing this package is cheap: the first call of `load` imports llama_cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from trioserve.errors import ModelLoadError

if TYPE_CHECKING:
    from trioserve.config import Config
    from trioserve.llama.backend import LlamaBackend
    from trioserve.llama.embedding import LlamaEmbedder
    from trioserve.llama.speech.speaker import LlamaSpeaker
    from trioserve.models.speech import SpeechFiles

Progress: TypeAlias = Callable[[float], bool]
_Loaded = TypeVar("_Loaded", bound="LlamaBackend | LlamaEmbedder | LlamaSpeaker")

__all__ = ["load", "load_speaker"]


def load(config: Config, *, progress: Progress | None = None) -> LlamaBackend | LlamaEmbedder:
    """Load a model, make its context, and try it out. Blocks, for seconds or minutes.

    With `Config.fit`, what the configuration leaves open is made to fit the free memory. Where the
    files are new to this machine, they are first loaded in another process, which a damaged one may
    end.

    Args:
        config: which file, how many sequences, how much context, how many threads.
        progress: called with the share of the weights that is loaded, 0.0 to 1.0, in the calling
            thread. Returning False cancels the load; what it raises is passed on.

    Raises:
        ModelLoadError: the file or the context cannot be used or was replaced meanwhile, or
            `progress` cancelled.
        BackendMismatchError: the installed llama.cpp is not one we can use.
    """
    from trioserve.llama import library
    from trioserve.llama.backend import LlamaBackend
    from trioserve.models.speech import resolve_speech

    library.check_library()
    speech = resolve_speech(config)
    backend = _load_with_drafts(config, progress)
    if speech is not None and isinstance(backend, LlamaBackend):
        backend.speaker = partial(load_speaker, config, speech)
    return backend


def _load_with_drafts(config: Config, progress: Progress | None) -> LlamaBackend | LlamaEmbedder:
    from trioserve.log import get_logger
    from trioserve.models import auto_drafts

    choice = auto_drafts.choose(config)
    if choice is None:
        return _load(config, progress, _load_text)
    log, chosen, has_ended = get_logger("llama"), choice.config, False
    log.info(f"drafts: {choice.reason}")

    def going_on(share: float) -> bool:
        nonlocal has_ended
        has_ended = progress is not None and not progress(share)
        return not has_ended

    try:
        return _load(chosen, going_on, _load_text)
    except ModelLoadError as error:
        is_free = "auto" in config.spec_type and config.spec_draft_model is None
        if has_ended or chosen.head_type is None or not is_free:
            raise
        why = error.message
    backend = _load(auto_drafts.without_head(chosen), progress, _load_text)
    log.warning("drafts: the head is not used", reason=why)
    return backend


def load_speaker(
    config: Config, files: SpeechFiles, *, progress: Progress | None = None
) -> LlamaSpeaker:
    """Load the model that speaks beside the one of a configuration, as `load` does.

    Raises:
        ModelLoadError: as `load`, and where the files do not fit each other or do not speak.
        BackendMismatchError: the installed llama.cpp is not one we can use.
    """
    from trioserve.llama import library
    from trioserve.llama.speech.speaker import LlamaSpeaker, speech_config

    library.check_library()
    return _load(speech_config(config, files), progress, LlamaSpeaker.load)


def _load(config: Config, progress: Progress | None, make: Callable[..., _Loaded]) -> _Loaded:
    from trioserve.llama import devices, room, trial, trial_process
    from trioserve.llama.backend import LlamaBackend
    from trioserve.log import get_logger
    from trioserve.models.tried import LoadedFiles

    found = room.plan(config) if config.fit == "on" else None
    if found is not None:
        room.report(found)
    fitted = config if found is None else found.config
    files = LoadedFiles.of(config, devices.versions())
    is_new = not files.are_known
    # A server with other machines is watched, and they have one client at a time.
    if is_new and config.trial_load and not config.rpc and sys.platform != "win32":
        first, progress = _halves(progress)
        is_new = not trial_process.run(fitted, first)
        if files != LoadedFiles.of(config, devices.versions()):
            raise ModelLoadError("a file of the model was replaced while it was tried")
    backend = make(fitted, progress=progress)
    if isinstance(backend, LlamaBackend):
        backend.try_adapter = partial(trial_process.try_adapter, fitted)
        if found is not None:
            backend.spare_ram = room.spare_ram(config, found)
    try:
        trial.try_out(backend, everything=is_new)
    except BaseException:
        backend.close()
        raise
    files.remember()
    used = ",".join(backend.beyond_interface) or "nothing"
    get_logger("llama").info("beyond llama.cpp's interface", used=used)
    return backend


def _halves(progress: Progress | None) -> tuple[Progress | None, Progress | None]:
    """Divide a report of progress between two loads of the same files."""
    if progress is None:
        return None, None
    return lambda share: progress(share / 2), lambda share: progress((1 + share) / 2)


def load_here(
    config: Config, *, progress: Progress | None = None
) -> LlamaBackend | LlamaEmbedder | LlamaSpeaker:
    """Load as `load` and `load_speaker` do, but do not try the model out."""
    if config.tts is None or config.tts != config.model:
        return _load_text(config, progress=progress)
    from trioserve.llama.speech.speaker import LlamaSpeaker

    return LlamaSpeaker.load(config, progress=progress)


def _load_text(config: Config, *, progress: Progress | None = None) -> LlamaBackend | LlamaEmbedder:
    if config.serves_embeddings:
        from trioserve.llama.embedding import LlamaEmbedder

        return LlamaEmbedder.load(config, progress=progress)
    from trioserve.llama.backend import LlamaBackend

    return LlamaBackend.load(config, progress=progress)
