"""Writes GGUF files with a fault in them: models, LoRA adapters, projectors and speakers.

`damaged(kind, seed, folder)` writes one, as flags for `Config`. The same seed makes the same file.
Most faults leave a file that is sound as a GGUF: a tensor of another type has as many bytes as that
takes. So what is wrong with it shows late, where llama.cpp computes.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import gguf

from tests.support import media_models, tiny_models
from tests.support.architectures import GENERATING
from tests.support.gguf_models import write_bert, write_decoder
from tests.support.lora_files import make_lora
from tests.support.speech_models import write_pocket, write_qwen
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR

_ALIGNMENT = 32
#: Sizes that no layer has, and those at which a division or a product goes wrong.
_NUMBERS = (0, 1, 3, 7, 2**20, 2**31 - 1, 2**31, 2**32 - 1)
_FLOATS = (0.0, -1.0, 1e30, math.nan, math.inf)
_TYPES = {one.value: one for one in gguf.GGMLQuantizationType}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@attrs.define
class _Tensor:
    name: bytes
    shape: list[int]
    kind: int
    data: bytes = attrs.field(repr=False)
    offset: int | None = None  # None: behind the one before

    @property
    def size(self) -> int:
        """The bytes that type and shape call for."""
        if self.kind not in _TYPES:
            return len(self.data)
        block, width = gguf.GGML_QUANT_SIZES[_TYPES[self.kind]]
        return min(math.prod(self.shape) // block * width, 2**24)

    def fit(self) -> None:
        """Have as much data as type and shape call for."""
        size = self.size
        self.data = (self.data * (size // max(1, len(self.data)) + 1))[:size]


@attrs.define
class File:
    """The parts of a GGUF file. Values of entries are kept as they are written."""

    entries: list[tuple[bytes, int, bytes]]
    tensors: list[_Tensor]

    def write(self, path: Path) -> None:
        """Write it, with data in the order of the tensors."""
        head = [struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.entries))]
        for key, kind, value in self.entries:
            head += [_text(key), struct.pack("<I", kind), value]
        data = bytearray()
        for one in self.tensors:
            offset = len(data) if one.offset is None else one.offset
            shape = struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape)
            head += [_text(one.name), shape, struct.pack("<IQ", one.kind, offset)]
            data += one.data + bytes(-len(one.data) % _ALIGNMENT)
        written = b"".join(head)
        path.write_bytes(written + bytes(-len(written) % _ALIGNMENT) + data)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@cache
def _read(path: Path) -> File:
    """Read a sound file."""
    source = path.read_bytes()
    at = 24
    n_tensors, n_entries = struct.unpack_from("<QQ", source, 8)

    def take(form: str) -> Any:
        nonlocal at
        values = struct.unpack_from(form, source, at)
        at += struct.calcsize(form)
        return values[0]

    def text() -> bytes:
        nonlocal at
        size = take("<Q")
        at += size
        return source[at - size : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == _STRING:
            text()
        elif kind == _ARRAY:
            item, count = take("<I"), take("<Q")
            for _ in range(count):
                skip(item)
        else:
            at += struct.calcsize(_CODES[kind])

    entries, found = [], []
    for _ in range(n_entries):
        key, kind = text(), take("<I")
        start = at
        skip(kind)
        entries.append((key, kind, source[start:at]))
    for _ in range(n_tensors):
        name, n = text(), take("<I")
        found.append(_Tensor(name, [take("<Q") for _ in range(n)], take("<I"), b"", take("<Q")))
    start = -(-at // _ALIGNMENT) * _ALIGNMENT
    for one in found:
        assert one.offset is not None
        one.data = source[start + one.offset :][: one.size]
        one.offset = None
    return File(entries, found)


# -- faults

Fault = Callable[[File, random.Random], str]


def _some_tensor(file: File, chosen: random.Random) -> _Tensor:
    """Choose a tensor; vectors as often as matrices."""
    rank = chosen.choice((1, 2, 3, 4))
    fitting = [one for one in file.tensors if len(one.shape) == rank] or file.tensors
    return chosen.choice(fitting)


def _other_number(file: File, chosen: random.Random) -> str:
    """Give a hyperparameter another value."""
    of_model = [
        i for i, (key, kind, _) in enumerate(file.entries)
        if kind in _CODES and not key.startswith((b"tokenizer.", b"general."))
    ]  # fmt: skip
    others = [i for i, (_, kind, _) in enumerate(file.entries) if kind in _CODES]
    place = chosen.choice(of_model if of_model and chosen.random() < 0.8 else others)
    key, kind, old = file.entries[place]
    code = _CODES[kind]
    if code == "?":
        value: Any = old == b"\0"
    elif code in "fd":
        value = chosen.choice(_FLOATS)
    else:
        now = struct.unpack(f"<{code}", old)[0]
        value = chosen.choice((*_NUMBERS, now + 1, now * 2, now // 2)) % 2 ** (8 * len(old))
        if code.islower():
            value -= 2 ** (8 * len(old)) if value >= 2 ** (8 * len(old) - 1) else 0
    file.entries[place] = (key, kind, struct.pack(f"<{code}", value))
    return f"{key.decode()} = {value}"


def _other_list(file: File, chosen: random.Random) -> str:
    """Change a list: its length, or a number in it."""
    lists = [i for i, (_, kind, value) in enumerate(file.entries) if kind == _ARRAY]
    if not lists:
        return _other_number(file, chosen)
    place = chosen.choice(lists)
    key, kind, value = file.entries[place]
    item, count = struct.unpack_from("<IQ", value)
    if item not in _CODES or not count:
        file.entries[place] = (key, kind, struct.pack("<IQ", item, 0))
        return f"{key.decode()} is empty"
    code = _CODES[item]
    items = list(struct.unpack_from(f"<{count}{code}", value, 12))
    i = chosen.randrange(count)
    if chosen.random() < 0.5:
        items = items[:i]
        what = f"{key.decode()} has {i} items"
    else:
        limit = 2 ** (8 * struct.calcsize(code) - code.islower())
        items[i] = chosen.choice(_FLOATS) if code in "fd" else chosen.choice(_NUMBERS) % limit
        what = f"{key.decode()}[{i}] = {items[i]}"
    file.entries[place] = (
        key, kind, struct.pack(f"<IQ{len(items)}{code}", item, len(items), *items),
    )  # fmt: skip
    return what


def _no_entry(file: File, chosen: random.Random) -> str:
    key, _, _ = file.entries.pop(chosen.randrange(len(file.entries)))
    return f"without {key.decode()}"


def _other_text(file: File, chosen: random.Random) -> str:
    texts = [i for i, (_, kind, _) in enumerate(file.entries) if kind == _STRING]
    place = chosen.choice(texts)
    key, kind, _ = file.entries[place]
    known = ("llama", "gemma3", "qwen3", "bert", "clip", "mlp", "gpt2", "none", "", "x" * 1000)
    value = chosen.choice(known)
    file.entries[place] = (key, kind, _text(value.encode()))
    return f"{key.decode()} = {value:.20}"


def _other_type(file: File, chosen: random.Random) -> str:
    """Give a tensor another type, and the data for it."""
    one = _some_tensor(file, chosen)
    fitting = [
        kind for kind, known in _TYPES.items()
        if kind != one.kind and (one.shape or [1])[0] % gguf.GGML_QUANT_SIZES[known][0] == 0
    ]  # fmt: skip
    one.kind = chosen.choice(fitting)
    one.fit()
    return f"{one.name.decode()} is {_TYPES[one.kind].name}"


def _wrong_type(file: File, chosen: random.Random) -> str:
    """Give a tensor another type, without the data for it."""
    one = _some_tensor(file, chosen)
    one.kind = chosen.choice((*_TYPES, 4, 5, 99, 2**31))
    return f"{one.name.decode()} says type {one.kind}"


def _other_shape(file: File, chosen: random.Random) -> str:
    """Give a tensor another shape, and the data for it."""
    one = _some_tensor(file, chosen)
    old = list(one.shape)
    i = chosen.randrange(len(old))
    block = gguf.GGML_QUANT_SIZES[_TYPES[one.kind]][0]
    how = chosen.randrange(7)
    if how == 0:
        one.shape.reverse()
    elif how == 1:
        one.shape = [math.prod(old)]
    elif how == 2 and len(old) < 4:
        one.shape.append(chosen.choice((1, 2)))
    elif how == 3 and len(old) > 1:
        one.shape.pop()
    elif how == 4:
        one.shape[i] *= 2
    elif how == 5:
        one.shape[i] = max(1, old[i] // 2)
    else:
        one.shape[i] = chosen.choice((0, 1, 3, 7, block, 2**20))
    if one.shape and one.shape[0] % block:
        one.kind = 0  # only whole blocks are sound
    one.fit()
    return f"{one.name.decode()} has {one.shape}, not {old}"


def _wrong_shape(file: File, chosen: random.Random) -> str:
    """Say another shape, without the data for it."""
    one = _some_tensor(file, chosen)
    i = chosen.randrange(len(one.shape))
    one.shape[i] = chosen.choice((0, 1, 3, 7, 2**20, 2**31, 2**62, 2**64 - 1))
    return f"{one.name.decode()} says {one.shape}"


def _other_offset(file: File, chosen: random.Random) -> str:
    one = chosen.choice(file.tensors)
    one.offset = chosen.choice((0, 1, 32, 2**20, 2**40, 2**63, 2**64 - 32))
    return f"{one.name.decode()} at {one.offset}"


def _no_tensor(file: File, chosen: random.Random) -> str:
    one = file.tensors.pop(chosen.randrange(len(file.tensors)))
    return f"without {one.name.decode()}"


def _swapped(file: File, chosen: random.Random) -> str:
    """Exchange the names of two tensors."""
    one, other = chosen.choice(file.tensors), _some_tensor(file, chosen)
    one.name, other.name = other.name, one.name
    return f"{one.name.decode()} and {other.name.decode()} are swapped"


def _renamed(file: File, chosen: random.Random) -> str:
    """Give a tensor the name of another one, which is then there twice, or of none."""
    one, other = chosen.choice(file.tensors), chosen.choice(file.tensors)
    old = one.name
    one.name = chosen.choice((other.name, b"", b"x" * 63, b"x" * 300, old + b"\0"))
    return f"{old.decode()} is named {one.name.decode():.40}"


def _other_data(file: File, chosen: random.Random) -> str:
    """Fill a tensor with ones in all bits, which is not a number, or with noise."""
    one = chosen.choice(file.tensors)
    noise = chosen.random() < 0.5
    one.data = chosen.randbytes(len(one.data)) if noise else b"\xff" * len(one.data)
    return f"{one.name.decode()} is {'noise' if noise else 'NaN'}"


#: By how often they come.
_FAULTS: Mapping[Fault, int] = {
    _other_number: 6,
    _other_list: 1,
    _no_entry: 2,
    _other_text: 1,
    _other_type: 6,
    _wrong_type: 1,
    _other_shape: 6,
    _wrong_shape: 2,
    _other_offset: 1,
    _no_tensor: 3,
    _swapped: 2,
    _renamed: 1,
    _other_data: 1,
}
#: Of bytes, not of parts.
_CUT, _FLIPPED = 2, 2

# -- files

_ARCHITECTURES = (*GENERATING, "decoder", "bert", "bundled")
_PROJECTORS = (*media_models.KINDS, "bundled")


@attrs.frozen
class Damaged:
    """A damaged file, as a part of a configuration, and what is wrong with it."""

    path: Path
    settings: dict[str, Any]
    fault: str


def damaged(kind: str, seed: int, folder: Path) -> Damaged:
    """Write a damaged "model", "adapter", "projector", or file of "speech".

    Sound files are kept in the folder.
    """
    chosen = random.Random(f"{kind} {seed}")
    sound, settings, field = _sound(kind, chosen, folder)
    path = folder / f"{kind}-{seed}.gguf"
    fault = _damage(sound, path, chosen)
    settings[field] = (str(path),) if field == "lora" else str(path)
    if kind == "speech":
        settings |= {"tts": settings["model"], "fit": "off"}  # as `speech_config` has it
    return Damaged(path, settings, f"{sound.stem}: {fault}")


def _sound(kind: str, chosen: random.Random, folder: Path) -> tuple[Path, dict[str, Any], str]:
    """Write a sound file; returns it, the other settings, and the field that it belongs to."""
    if kind == "adapter":
        path = folder / "adapter.gguf"
        return path if path.exists() else make_lora(path), {"mmproj_auto": False}, "lora"
    if kind == "projector":
        name = chosen.choice(_PROJECTORS)
        if name == "bundled":
            return BUNDLED_PROJECTOR, {}, "mmproj"
        pairs = folder / "pairs"
        pairs.mkdir(exist_ok=True)
        pair = media_models.write_pair(pairs, name)
        return pair.projector, pair.settings, "mmproj"
    if kind == "speech":
        write = chosen.choice((write_pocket, write_qwen))
        pair = write(folder)
        field = chosen.choice(("model", "mmproj", "mmproj"))
        files = {"model": str(pair.model), "mmproj": str(pair.projector)}
        return Path(files[field]), files, field
    name = chosen.choice(_ARCHITECTURES)
    path = folder / f"{name}.gguf"
    settings: dict[str, Any] = {"mmproj_auto": False}
    if name == "bundled":
        return BUNDLED, settings, "model"
    if name in ("bert", "decoder"):
        settings["embeddings"] = True
    if path.exists():
        return path, settings, "model"
    if name == "bert":
        return write_bert(path).path, settings, "model"
    if name == "decoder":
        return write_decoder(path), settings, "model"
    return tiny_models.write(path, GENERATING[name]), settings, "model"


def _damage(sound: Path, path: Path, chosen: random.Random) -> str:
    n = sum(_FAULTS.values())
    what = chosen.randrange(n + _CUT + _FLIPPED)
    if what >= n:
        return _damage_bytes(sound, path, chosen, cut=what < n + _CUT)
    file = _copy(_read(sound))
    faults = chosen.choices(
        list(_FAULTS), weights=list(_FAULTS.values()), k=chosen.choice((1, 1, 2))
    )
    said = [fault(file, chosen) for fault in faults]
    file.write(path)
    return "; ".join(said)


def _copy(file: File) -> File:
    tensors = [attrs.evolve(one, shape=list(one.shape)) for one in file.tensors]
    return File(list(file.entries), tensors)


def _damage_bytes(sound: Path, path: Path, chosen: random.Random, *, cut: bool) -> str:
    data = bytearray(sound.read_bytes())
    if cut:
        size = chosen.choice((chosen.randrange(100), chosen.randrange(len(data))))
        path.write_bytes(data[:size])
        return f"{size} bytes of {len(data)}"
    places = [chosen.randrange(min(len(data), chosen.choice((700, 20_000)))) for _ in range(3)]
    for place in places:
        data[place] = chosen.choice((0, 255, data[place] ^ 1 << chosen.randrange(8)))
    path.write_bytes(data)
    return f"other bytes at {places}"


# -- what no header shows


def deadly_model(path: Path) -> Path:
    """Write a model that passes the checks of its header, and ends llama.cpp in its context."""
    sound = tiny_models.write(path.with_suffix(".sound"), GENERATING["deepseek2"])
    file = _copy(_read(sound))
    file.entries = [one for one in file.entries if not one[0].endswith(b"head_count_kv")]
    file.write(path)
    return path


def deadly_adapter(path: Path) -> Path:
    """Write an adapter for the bundled model that ends llama.cpp when it is switched on."""
    file = _copy(_read(make_lora(path.with_suffix(".sound"))))
    for one in file.tensors:
        one.shape.append(2)
        one.fit()
    file.write(path)
    return path


def deadly_projector(path: Path) -> Path:
    """Write a projector of the kind qwen3a that ends llama.cpp at the first sound."""
    file = _copy(_read(media_models.write_projector(path.with_suffix(".sound"), "qwen3a")))
    (bias,) = (one for one in file.tensors if one.name == b"a.conv2d.2.bias")
    bias.shape = [3]
    bias.fit()
    file.write(path)
    return path
