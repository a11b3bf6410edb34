"""The devices that llama.cpp can compute on, and which tensors go where.

The Python bindings lack these functions of ggml, so they are called by name here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import attrs

from trioserve.config import Config
from trioserve.config.readers import parse_override, parse_placement
from trioserve.errors import BackendMismatchError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.library import lib

#: Functions of ggml: the type of the result, and the types of the arguments.
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_backend_dev_count": (ctypes.c_size_t, ()),
    "ggml_backend_dev_get": (ctypes.c_void_p, (ctypes.c_size_t,)),
    "ggml_backend_dev_name": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "ggml_backend_dev_description": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "ggml_backend_dev_memory": (
        None,
        (ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
    ),
    "ggml_backend_dev_type": (ctypes.c_int, (ctypes.c_void_p,)),
    "ggml_backend_dev_buffer_type": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "ggml_backend_cpu_buffer_type": (ctypes.c_void_p, ()),
    "ggml_backend_dev_backend_reg": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "ggml_backend_load": (ctypes.c_void_p, (ctypes.c_char_p,)),
    "ggml_backend_reg_by_name": (ctypes.c_void_p, (ctypes.c_char_p,)),
    "ggml_backend_reg_get_proc_address": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)),
    "ggml_backend_reg_name": (ctypes.c_char_p, (ctypes.c_void_p,)),
    "ggml_backend_register": (None, (ctypes.c_void_p,)),
    "ggml_commit": (ctypes.c_char_p, ()),
    "ggml_version": (ctypes.c_char_p, ()),
}

_CPU, _GPU = 0, 1  # of the types of a device

_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_LAZY_MODES = {"off": 0, "auto": 1, "on": 2}
_KINDS = {"int": 0, "float": 1, "bool": 2, "str": 3}

_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE = r"\.ffn_(up|down|gate)\."


@cache
def ggml(name: str) -> Callable[..., Any]:
    """Return a function of ggml. Raises BackendMismatchError if it does not exist."""
    result, arguments = _FUNCTIONS[name]
    try:
        function: Any = getattr(library.ggml(), name)
    except AttributeError:
        raise BackendMismatchError(f"The installed ggml lacks {name}.") from None
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


def versions() -> str:
    """Return the versions of llama.cpp and ggml, and the commit that ggml was built from."""
    parts = (lib.llama_version(), ggml("ggml_version")(), ggml("ggml_commit")())
    version, of_ggml, commit = (part.decode(errors="replace") for part in parts)
    return f"llama.cpp {version}, ggml {of_ggml} (commit {commit})"


def system() -> str:
    """Return the CPU features that llama.cpp uses."""
    library.start()
    return str(lib.llama_print_system_info().decode(errors="replace").strip(" |"))


@attrs.frozen
class Device:
    """Something that llama.cpp can compute on. `handle` is ggml's pointer.

    What is `remote` is on another machine.
    """

    handle: int
    name: str
    description: str
    is_cpu: bool
    is_gpu: bool = False
    remote: bool = False


def devices() -> tuple[Device, ...]:
    """Return all devices, in ggml's order. Raises BackendMismatchError."""
    library.start()
    found = []
    for i in range(ggml("ggml_backend_dev_count")()):
        handle = ggml("ggml_backend_dev_get")(i)
        kind = ggml("ggml_backend_dev_type")(handle)
        backend = ggml("ggml_backend_reg_name")(ggml("ggml_backend_dev_backend_reg")(handle))
        found.append(
            Device(
                handle,
                ggml("ggml_backend_dev_name")(handle).decode(errors="replace"),
                ggml("ggml_backend_dev_description")(handle).decode(errors="replace"),
                is_cpu=kind == _CPU,
                is_gpu=kind == _GPU,
                remote=backend == b"RPC",
            )
        )
    return tuple(found)


def memory_of(device: Device) -> tuple[int, int]:
    """Return how many bytes of a device's memory are free, and how many it has; 0: unknown."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml("ggml_backend_dev_memory")(device.handle, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


# -- the parameters of a model


class _Placement(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


def place(params: Any, config: Config) -> list[Any]:
    """Set the parameters of a model that place its tensors or replace its metadata.

    Returns what must be kept alive until the model is loaded.

    Raises:
        ModelLoadError: there is no such device or buffer, or there are more shares than devices.
    """
    params.split_mode = _SPLIT_MODES[config.split_mode]
    params.lazy_mode = _LAZY_MODES[config.lazy_mode]
    params.main_gpu = config.main_gpu
    params.use_extra_bufts = config.repack
    params.no_host = config.no_host
    kept: list[Any] = []
    used = used_by(config)
    if config.rpc and not config.device and not any(one.remote for one in used):
        raise ModelLoadError("rpc: no other machine is connected to this process.")
    # llama.cpp would not choose other machines by itself, and uses all of those that there are.
    if config.device or any(one.remote for one in devices()):
        handles = [one.handle for one in used]
        kept.append((ctypes.c_void_p * (len(handles) + 1))(*handles, None))
        params.devices = ctypes.cast(kept[-1], ctypes.c_void_p)
    if config.tensor_split:
        max_devices = int(lib.llama_max_devices())
        if len(config.tensor_split) > max_devices:
            raise ModelLoadError(
                f"tensor_split has {len(config.tensor_split)} shares; llama.cpp takes at most "
                f"{max_devices}."
            )
        kept.append((ctypes.c_float * max_devices)(*config.tensor_split))
        params.tensor_split = ctypes.cast(kept[-1], ctypes.POINTER(ctypes.c_float))
    if placements := _placements(config):
        kept.append((_Placement * (len(placements) + 1))(*(_Placement(*one) for one in placements)))
        params.tensor_buft_overrides = ctypes.cast(kept[-1], ctypes.c_void_p)
    if config.override_kv:
        kept.append(_overrides(config.override_kv))
        params.kv_overrides = kept[-1]
    return kept


def used_by(config: Config) -> list[Device]:
    """Return the devices that a model may use besides the CPU, in order.

    They are those that are named, or else the other machines, if the model uses them, and the local
    GPUs. Raises ModelLoadError as `chosen`.
    """
    if config.device:
        return chosen(config.device)
    known = devices()
    remote = [one for one in known if one.remote and config.rpc]
    return [*remote, *(one for one in known if one.is_gpu and not one.remote)]


def chosen(names: tuple[str, ...]) -> list[Device]:
    """Return the devices with these names; "none" is no device but the CPU."""
    if names == ("none",):
        return []
    known = {one.name: one for one in devices()}
    for name in names:
        if name not in known or known[name].is_cpu:
            there = ", ".join(one.name for one in known.values() if not one.is_cpu) or "none"
            raise ModelLoadError(f"There is no device {name!r} to offload to; available: {there}.")
    return [known[name] for name in names]


def _placements(config: Config) -> list[tuple[bytes, int]]:
    """Return patterns of tensor names with their buffers; the first that matches decides."""
    found = []
    if config.override_tensor:
        buffers = _buffers()
        for pattern, name in map(parse_placement, config.override_tensor):
            if name not in buffers:
                raise ModelLoadError(
                    f"There is no buffer type {name!r}; available: {', '.join(buffers)}."
                )
            found.append((pattern, buffers[name]))
    cpu = ggml("ggml_backend_cpu_buffer_type")
    if config.cpu_moe:
        found.append((_EXPERTS, cpu()))
    for i in range(config.n_cpu_moe):
        found.append((rf"blk\.{i}{_EXPERTS}", cpu()))
    for i in range(config.n_cpu_ffn):
        found.append((rf"blk\.{i}{_DENSE}", cpu()))
    return [(pattern.encode(), buffer) for pattern, buffer in found]


def _buffers() -> dict[str, int]:
    found = {}
    for one in devices():
        if buffer := ggml("ggml_backend_dev_buffer_type")(one.handle):
            found[ggml("ggml_backend_buft_name")(buffer).decode(errors="replace")] = buffer
    return found


def overridden(config: Config) -> dict[str, str]:
    """Return the metadata that `override_kv` replaces, as text; llama.cpp does not tell."""
    found = map(parse_override, config.override_kv)
    return {
        one.key: str(one.value).lower() if one.kind == "bool" else str(one.value) for one in found
    }


def _overrides(texts: tuple[str, ...]) -> Any:
    """Make llama.cpp's array of metadata, which ends with an empty key."""
    array = (lib.llama_model_kv_override * (len(texts) + 1))()
    for entry, one in zip(array, map(parse_override, texts), strict=False):
        entry.tag, entry.key = _KINDS[one.kind], one.key.encode()
        if one.kind == "str":
            entry.value.val_str = str(one.value).encode()
        elif one.kind == "bool":
            entry.value.val_bool = bool(one.value)
        elif one.kind == "float":
            entry.value.val_f64 = float(one.value)
        else:
            entry.value.val_i64 = int(one.value)
    return array
