"""`Limits`: how much a program may use."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Limits:
    """What a program and all that it starts may use. Beyond, it is ended."""

    #: Processes at the same time.
    processes: int = 64
    #: Bytes of memory, together; 0: no limit.
    memory: int = 2 * 2**30
    #: Open descriptors of each process.
    descriptors: int = 1024
    #: Bytes of a file that it writes.
    file_size: int = 2 * 2**30

    @property
    def rlimits(self) -> list[tuple[str, int]]:
        """What the kernel looks after, for each process."""
        limits = [
            ("RLIMIT_CORE", 0),
            ("RLIMIT_NOFILE", self.descriptors),
            ("RLIMIT_FSIZE", self.file_size),
        ]
        if self.memory:
            # A program may reserve more than it uses. This stops one that is too quick to be seen.
            limits.append(("RLIMIT_DATA", 4 * self.memory))
        return limits
