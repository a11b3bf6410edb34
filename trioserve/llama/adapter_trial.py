"""Tries a LoRA adapter that comes to a loaded model, as those are tried that come with it."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs

from trioserve.config import Config
from trioserve.config.checks import without_drafts
from trioserve.errors import ModelLoadError
from trioserve.llama import devices
from trioserve.llama.machine import free_memory
from trioserve.models.gguf import check_file
from trioserve.models.tried import LoadedFiles

#: Tokens of the context in which an adapter is tried.
_TRIAL_CONTEXT = 512


def try_adapter(config: Config, path: Path) -> None:
    """Try an adapter with a model in another process, if the file is new to this machine. Blocks.

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
    from trioserve.llama import trial_process

    trial_process.run(config)
    if files != LoadedFiles.of(config, devices.versions()):
        raise ModelLoadError(f"The LoRA adapter {path} was replaced while it was tried.")
    files.remember()
