"""Folders of the user who runs the program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from trioserve.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """A path with the user's home folder for ``~`` at its beginning.

    Raises:
        ConfigError: the user has none.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:  # neither a variable nor the system's list of users names it
        raise ConfigError(
            "This user has no home folder, which is where downloaded models are kept: set HOME, or "
            "name another folder by HF_HOME or LLAMA_CACHE."
        ) from None


def user_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for what programs can make again. Raises as `expanded`."""
    return expanded(environ.get("XDG_CACHE_HOME") or "~/.cache")


def user_state(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for what this program keeps of its use. Raises as `expanded`."""
    return expanded(environ.get("XDG_STATE_HOME") or "~/.local/state") / "trioserve"
