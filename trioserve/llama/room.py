"""Fits a configuration into the memory that is free now: reads headers, and what is free.

No more than the headers is read, and not by llama.cpp, so a damaged file cannot end the process.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import devices
from trioserve.llama.fit import Fit, Models, Room, fit, summary
from trioserve.llama.library import lib
from trioserve.llama.machine import anonymous_memory, free_memory, total_memory
from trioserve.llama.model import load_mode
from trioserve.llama.shape import Shape, read_shape
from trioserve.llama.speech.speaker import size_of
from trioserve.log import get_logger
from trioserve.models import resolve, resolve_projector
from trioserve.models.gguf import check_file, total_size
from trioserve.models.speech import resolve_speech

_log = get_logger("llama")

_DROPPED = ("auto", "mmap")


def plan(config: Config, *, more_ram: int = 0) -> Fit | None:
    """Choose what the configuration leaves open; see `trioserve.llama.fit`. Blocks for a moment.

    Args:
        config: the configuration.
        more_ram: bytes of RAM that others will free.

    Returns:
        what fits; None if a header cannot be read, or it is not known what is free. llama.cpp then
        has the last word.

    Raises:
        ModelLoadError: a file cannot be used, or nothing that may be chosen fits.
    """
    path = resolve(config.model)
    check_file(path)
    shape = read_shape(path, devices.overridden(config))
    free = free_memory()
    if shape is None or free is None or (gpus := _free_on_gpus(config)) is None:
        return None
    draft = None if config.spec_draft_model is None else _draft(config)
    projector = None if config.reranking else resolve_projector(config)
    files = [Path(name) for name, _ in config.lora_files]
    speech = resolve_speech(config)
    of_speech = 0 if speech is None else size_of(speech, config)
    if gpus:  # the one with the most room gets it
        most = max(range(len(gpus)), key=gpus.__getitem__)
        gpus = (*gpus[:most], max(0, gpus[most] - of_speech), *gpus[most + 1 :])
        of_speech = 0
    models = Models(
        model=shape,
        draft=draft,
        others=total_size(files if projector is None else [*files, projector]) + of_speech,
        is_mapped=load_mode(path, config) in _DROPPED,
    )
    more_ram += anonymous_memory()  # the server's own part is in the sum
    room = Room(
        ram=(free_memory(for_files=True) or free) + more_ram,
        data=free + more_ram,
        gpus=gpus,
        total_ram=total_memory() or 0,
    )
    return fit(models, config, room)


def _free_on_gpus(config: Config) -> tuple[int, ...] | None:
    """Return what is free on each device that the model may use; None: one does not say."""
    if not lib.llama_supports_gpu_offload() or config.n_gpu_layers == 0:
        return ()
    free = tuple(devices.memory_of(one)[0] for one in devices.used_by(config))
    return free if all(free) else None


def _draft(config: Config) -> Shape | None:
    """Read the shape of the draft model; one that cannot be used is refused as it is loaded."""
    path = resolve(config.spec_draft_model)
    try:
        check_file(path)
        return read_shape(path, devices.overridden(config))
    except ModelLoadError:
        return None


def spare_ram(config: Config, found: Fit) -> int | None:
    """Return how many bytes of RAM prompts outside the KV cache may take; None: as configured."""
    return None if config.cache_ram != attrs.fields(Config).cache_ram.default else found.left // 2


def report(found: Fit) -> None:
    """Log what was chosen, and why."""
    _log.info(f"memory: {summary(found)}")
    if found.is_tight:
        _log.warning(
            "the weights do not fit into the free memory: the file is read again and again, which "
            "is slow; take one with a smaller quantization"
        )
