"""Folders of the user, and files that are replaced in one step: no reader sees a partial one."""

from __future__ import annotations

import os
import tempfile
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


def give_to_owner(target: Path, new: str, *, keep_mode: bool = False) -> None:
    """Give a file the owner of the target, such as the user of the server, or also its mode."""
    status = target.stat()
    if hasattr(os, "chown"):
        os.chown(new, status.st_uid, status.st_gid)
    os.chmod(new, status.st_mode & 0o777 if keep_mode else 0o600)


def unwritable(path: str, error: OSError) -> ConfigError:
    """Make the error about a file that cannot be written."""
    return ConfigError(f"{path} cannot be written: {error.strerror or error}")


def replace_file(path: str, text: str, *, keep_mode: bool = False) -> None:
    """Write a file at once, for its owner only or as it was. Raises ConfigError."""
    target = Path(os.path.realpath(path))
    new = None
    try:
        descriptor, new = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(descriptor, "w", encoding="utf-8") as file:
            if target.exists():
                give_to_owner(target, new, keep_mode=keep_mode)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(new, target)
    except OSError as error:
        if new is not None:
            Path(new).unlink(missing_ok=True)
        raise unwritable(path, error) from None
