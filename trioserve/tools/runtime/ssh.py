"""`SshHost`: tools on another host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from trioserve.errors import ToolRuntimeError
from trioserve.tools.runtime.isolate import Isolate

#: What begins with ``-`` would be an option.
_TARGET = re.compile(r"[A-Za-z0-9._@][A-Za-z0-9._@-]*")

#: There is nobody to answer a question, so keys must do, and the host must be known.
_OPTIONS = (
    "BatchMode=yes",
    "PasswordAuthentication=no",
    "KbdInteractiveAuthentication=no",
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=10",
)


class SshHost(Isolate):
    """A host that takes the user's key. Tools may do there all that the user may."""

    def __init__(self, target: str) -> None:
        """Reach it as ``user@host`` or by a name of the user's configuration of ssh.

        Raises:
            ToolRuntimeError: this is no target.
        """
        if not _TARGET.fullmatch(target):
            raise ToolRuntimeError(f"invalid ssh target: {target}")
        self._target = target

    async def argv(self, command: Sequence[str]) -> list[str]:
        """What runs a command there."""
        options = [word for option in _OPTIONS for word in ("-o", option)]
        # A shell there reads the command again.
        return ["ssh", "-T", *options, self._target, shlex.join(command)]
