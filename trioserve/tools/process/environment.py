"""The variables that a program is given: few, and no keys."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trioserve.tools.process.fence import CommandFence

_NAMES = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE",
     "TERM", "TMPDIR", "TZ", "USER"}
)  # fmt: skip

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def clean_environment(fence: CommandFence | None = None) -> Mapping[str, str]:
    """Those of this process that say where and in which language it runs. No others.

    ``PATH`` has only folders that the fence lets a program read.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NAMES or name.startswith("LC_")
    }
    kept["PATH"] = _path(kept.get("PATH", _DEFAULT_PATH), fence)
    kept.setdefault("TERM", "dumb")
    return kept


def _path(path: str, fence: CommandFence | None) -> str:
    folders = [folder for folder in path.split(":") if os.path.isabs(folder)]
    if fence is not None:
        folders = [folder for folder in folders if fence.may_read(folder)]
    return ":".join(folders) or _DEFAULT_PATH
