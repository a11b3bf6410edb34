"""Removes secrets from this process's command line and initial environment, as `ps` shows them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from trioserve.config.flags import FLAGS, SECRET_VARIABLES, SECRETS

#: Flags whose values are secrets, and their variables.
_FLAGS = tuple(name.encode() for one in FLAGS if one.field in SECRETS for name in one.names)
_VARIABLES = tuple(map(os.fsencode, SECRET_VARIABLES))

#: Fields of /proc/self/stat, counted from the one behind the name: see proc_pid_stat(5).
_ARGUMENTS, _ENVIRONMENT = 45, 47


def hide_secrets() -> None:
    """Overwrite secrets where the kernel shows them to other processes of this user. Linux only.

    What Python has read of them stays as it is.
    """
    if sys.platform != "linux":
        return
    _overwrite(_ARGUMENTS, _secret_arguments)
    hide_variables(_VARIABLES)


def hide_variables(names: Collection[bytes]) -> None:
    """Overwrite the values of variables in the same way."""
    if sys.platform != "linux" or not names:
        return
    _overwrite(_ENVIRONMENT, partial(_secret_variables, names))
    for name in map(os.fsdecode, names):
        if name in os.environ:
            os.environ[name] = os.environ[name]  # another copy, for the processes that this starts


def _overwrite(field: int, find: Callable[[list[bytes]], Iterator[tuple[int, int]]]) -> None:
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    start, end = int(fields[field]), int(fields[field + 1])
    if not start:
        return  # the kernel does not tell
    words = ctypes.string_at(start, end - start).split(b"\0")
    for index, begin in find(words):
        place = sum(len(word) + 1 for word in words[:index])
        ctypes.memset(start + place + begin, ord("*"), len(words[index]) - begin)


def _secret_arguments(words: list[bytes]) -> Iterator[tuple[int, int]]:
    """Find the values of flags: each as the index of a word, and where it begins there."""
    for index, word in enumerate(words):
        flag, equals, _ = word.partition(b"=")
        if word.replace(b"_", b"-") in _FLAGS:
            yield index + 1, 0
        elif equals and flag.replace(b"_", b"-") in _FLAGS:
            yield index, len(flag) + 1


def _secret_variables(names: Collection[bytes], words: list[bytes]) -> Iterator[tuple[int, int]]:
    for index, word in enumerate(words):
        name = word.partition(b"=")[0]
        if name in names:
            yield index, len(name) + 1
