"""Kills processes that write files of states, and looks at what each of them has left.

Run as ``python -m tests.support.killed_writers FOLDER KILLS``. Prints the number of kills, of the
files that were read, and of the parts of files that a kill has left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from trioserve.engine.cache.state_files import StateFolder, StateHead

IDENTITY = "0" * 32
LIMIT = 64 * 2**20
#: The longest that a writer lives, in seconds: it writes some files.
LIFE = 0.03


def state_of(keys: list[int]) -> bytes:
    return bytes(key % 251 for key in keys) * 4096


def write_on(base: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = StateFolder(base, IDENTITY, LIMIT)
    folder.open()
    while True:
        keys = [rng.randrange(2**20) for _ in range(rng.randrange(1, 1000))]
        folder.write(StateHead(bytes(16), keys, is_checkpoint=False), state_of(keys), lambda: False)


def kill_one(base: Path, seed: int) -> None:
    pid = os.fork()
    if not pid:
        try:
            write_on(base, seed)
        finally:
            os._exit(1)
    time.sleep(random.Random(seed).uniform(0, LIFE))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the writer has failed"


def main(base: Path, n_kills: int) -> None:
    n_files = n_parts = 0
    for seed in range(n_kills):
        kill_one(base, seed)
        if (base / IDENTITY).exists():
            n_parts += sum(name.endswith(".part") for name in os.listdir(base / IDENTITY))
        folder = StateFolder(base, IDENTITY, LIMIT)
        folder.open()
        names = folder.names()
        assert set(os.listdir(folder.path)) == names, "a part is left after the next start"
        for name in names if seed % 20 == 19 or seed == n_kills - 1 else ():
            head, state = folder.read(name)
            assert state == state_of(list(head.keys)), "a state of other keys"
            n_files += 1
        for name in names:
            folder.head(name)
    print(n_kills, n_files, n_parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
