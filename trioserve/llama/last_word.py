"""A last line of the log, where llama.cpp ends the process: it names the files in use.

Python code cannot handle such a signal: its thread may hold any lock. So the handler is machine
code that writes a prepared text, and raises the signal again. Processors other than
x86-64 and 64-bit ARM have no handler, nor have systems that forbid executable memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable

#: Signals of `abort`, a bad address, a division by zero, a file cut short, a bad instruction.
_SIGNALS = ("SIGABRT", "SIGSEGV", "SIGFPE", "SIGBUS", "SIGILL")

_PAGE = mmap.PAGESIZE
_LENGTH = struct.Struct("<I")


class _LastWord:
    """The text: two pages of memory, the instructions in the first, the text in the second."""

    def __init__(self, descriptor: int, form: Callable[[str], str]) -> None:
        self._form = form
        self._pages = mmap.mmap(-1, 2 * _PAGE)
        #: Keeps the address valid.
        self._start = ctypes.c_char.from_buffer(self._pages)
        self.address = ctypes.addressof(self._start)
        self.write("")
        text = self.address + _PAGE
        self._pages[:_PAGE] = _CODES[platform.machine()](
            descriptor, text + _LENGTH.size, text
        ).ljust(_PAGE, b"\0")

    def write(self, files: str) -> None:
        """Replace the line that a fatal signal prints."""
        line = self._form(files).encode(errors="backslashreplace")[: _PAGE - _LENGTH.size - 1]
        line = line.replace(b"\n", b" ") + b"\n"
        # A signal between the two would see a part of the new text.
        self._pages[_PAGE : _PAGE + _LENGTH.size] = _LENGTH.pack(0)
        start = _PAGE + _LENGTH.size
        self._pages[start : start + len(line)] = line
        self._pages[_PAGE : _PAGE + _LENGTH.size] = _LENGTH.pack(len(line))


def _x86_64(descriptor: int, text: int, length: int) -> bytes:
    return (
        b"\x57"  # push rdi, the signal
        + b"\xbf" + struct.pack("<I", descriptor)  # mov edi, descriptor
        + b"\x48\xbe" + struct.pack("<Q", text)  # mov rsi, text
        + b"\x48\xb9" + struct.pack("<Q", length)  # mov rcx, length
        + b"\x8b\x11"  # mov edx, [rcx]
        + b"\xb8\x01\0\0\0\x0f\x05"  # mov eax, write; syscall
        + b"\xb8\x27\0\0\0\x0f\x05\x50"  # mov eax, getpid; syscall; push rax
        + b"\xb8\xba\0\0\0\x0f\x05\x89\xc6"  # mov eax, gettid; syscall; mov esi, eax
        + b"\x5f\x5a"  # pop rdi; pop rdx
        + b"\xb8\xea\0\0\0\x0f\x05\xc3"  # mov eax, tgkill; syscall; ret
    )  # fmt: skip


def _aarch64(descriptor: int, text: int, length: int) -> bytes:
    def move(register: int, value: int) -> list[int]:
        parts = [(i, value >> 16 * i & 0xFFFF) for i in range(4)]
        return [(0xF2800000 if i else 0xD2800000) | i << 21 | part << 5 | register
                for i, part in parts]  # fmt: skip

    call = 0xD4000001  # svc 0
    code = [
        0x2A0003E9,  # mov w9, w0: the signal
        *move(0, descriptor), *move(1, text), *move(2, length),
        0xB9400042,  # ldr w2, [x2]
        *move(8, 64), call,  # write
        *move(8, 172), call, 0x2A0003EA,  # getpid; mov w10, w0
        *move(8, 178), call, 0x2A0003E1,  # gettid; mov w1, w0
        0x2A0A03E0, 0x2A0903E2,  # mov w0, w10; mov w2, w9
        *move(8, 131), call,  # tgkill
        0xD65F03C0,  # ret
    ]  # fmt: skip
    return struct.pack(f"<{len(code)}I", *code)


_CODES: dict[str, Callable[[int, int, int], bytes]] = {"x86_64": _x86_64, "aarch64": _aarch64}

_last_word: _LastWord | None = None


def install(descriptor: int, form: Callable[[str], str]) -> None:
    """Have a line written to a descriptor when a signal ends this process by a fault in it.

    `form` makes the line from the files in use. llama.cpp no longer starts gdb to print a stack.
    Does nothing if Python's faulthandler is enabled.
    """
    global _last_word
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    if sys.platform != "linux" or platform.machine() not in _CODES or faulthandler.is_enabled():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # One shot: when the signal is raised again, it ends the process.
    set_handler = getattr(libc, "sysv_signal", None)
    if set_handler is None:
        return
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    made = _LastWord(descriptor, form)
    if libc.mprotect(ctypes.c_void_p(made.address), _PAGE, mmap.PROT_READ | mmap.PROT_EXEC):
        return  # the system does not allow it
    _last_word = made
    for name in _SIGNALS:
        set_handler(getattr(signal, name), made.address)


def names(*files: str) -> None:
    """Name the files that llama.cpp works with from now on."""
    if _last_word is not None:
        _last_word.write(", ".join(files))
