"""The model files of a directory, and their properties."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path

import attrs

from trioserve.config.readers import unicode_name
from trioserve.errors import ConfigError
from trioserve.models import gguf
from trioserve.models.gguf import GgufName, Header, parts_of, total_size
from trioserve.models.head_families import FILE_WORDS
from trioserve.types import Modalities

_log = logging.getLogger("trioserve.models.catalog")


class Source(Enum):
    """The origin of a model. One that has a section in the preset file is from there."""

    BUNDLED = "bundled"
    CACHE = "cache"
    DIRECTORY = "directory"
    PRESET = "preset"
    UPSTREAM = "upstream"


@attrs.frozen
class ModelFiles:
    """A model before presets: its name, its files, the first part first, and its projector."""

    name: str
    files: tuple[Path, ...]
    mmproj: Path | None = None
    source: Source = Source.DIRECTORY


def models_in(directory: Path) -> list[ModelFiles]:
    """List the models of a directory.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"models_dir: {directory} cannot be read: {error.strerror}") from None
    found = list(_models(entry for entry in entries if entry.is_file()))
    for folder in entries:
        if folder.is_dir() and not folder.name.startswith("."):
            found += _models_of_folder(folder)
    return found


def _models_of_folder(folder: Path) -> Iterator[ModelFiles]:
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    except OSError as error:
        _log.warning("the folder %s cannot be read: %s", folder, error.strerror)
        return
    models = list(_models(files))
    mmproj = next(filter(_is_projector, files), None)
    for one in models:
        name = unicode_name(folder.name)
        if len(models) > 1:
            name = f"{name}/{one.name}"
        yield attrs.evolve(one, name=name, mmproj=mmproj)


def _models(files: Iterable[Path]) -> Iterator[ModelFiles]:
    for path in files:
        name = GgufName.read(path.name)
        if name is None or name.part != 1 or path.name.startswith((".", *FILE_WORDS.values())):
            continue
        if _is_projector(path):
            continue
        parts = parts_of(path)
        if missing := [each.name for each in parts if not each.is_file()]:
            _log.warning("%s is left out, for %s is missing", path, ", ".join(missing))
        else:
            yield ModelFiles(unicode_name(name.stem), parts)


def _is_projector(path: Path) -> bool:
    name = path.name.lower()
    return name.endswith(".gguf") and "mmproj" in name and not name.startswith(".")


#: llama.cpp's numbers for what most tensors of a file are, as the names of files write them.
_FILE_TYPES: Mapping[float | None, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip


#: Longer lists of languages are not shown.
_MAX_LANGUAGES = 1000


@attrs.frozen(kw_only=True)
class GgufSummary:
    """Properties of a model, by its files. Missing texts are empty, missing numbers 0.

    `n_files` is how many parts the model has, `size` their bytes together, and `n_params` the
    number of weights.
    """

    path: Path
    name: str
    architecture: str
    n_files: int
    size: int
    n_params: int
    quantization: str
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_vocab: int
    n_experts: int
    n_experts_used: int
    template: str
    licence: str
    licence_link: str
    languages: tuple[str, ...]


def describe(path: Path) -> GgufSummary:
    """Read the headers of a model's files. Blocks.

    Args:
        path: the first of its files.

    Raises:
        ModelLoadError: a file is missing, or no GGUF file, or damaged.
    """
    files = parts_of(path)
    with gguf.read(path) as header:
        arch = header.text("general.architecture")
        summary = GgufSummary(
            path=path,
            name=header.text("general.name"),
            architecture=arch,
            n_files=len(files),
            size=total_size(files),
            n_params=_n_params(header),
            quantization=_FILE_TYPES.get(header.number("general.file_type"), ""),
            n_ctx_train=header.whole(f"{arch}.context_length"),
            n_embd=header.whole(f"{arch}.embedding_length"),
            n_layer=header.whole(f"{arch}.block_count"),
            n_vocab=header.count("tokenizer.ggml.tokens"),
            n_experts=header.whole(f"{arch}.expert_count"),
            n_experts_used=header.whole(f"{arch}.expert_used_count"),
            template=header.text("tokenizer.chat_template"),
            licence=header.text("general.license"),
            licence_link=header.text("general.license.link"),
            languages=_languages(header),
        )
    rest = 0
    for part in files[1:]:
        with gguf.read(part) as header:
            rest += _n_params(header)
    return attrs.evolve(summary, n_params=summary.n_params + rest)


def modalities_in(projector: Path | None) -> Modalities:
    """Read what a model takes beside text from the header of its projector. Blocks.

    Raises:
        ModelLoadError: the file is missing, or no GGUF file, or damaged.
    """
    if projector is None:
        return Modalities()
    with gguf.read(projector) as header:
        return Modalities(
            vision=header.flag("clip.has_vision_encoder"),
            audio=header.flag("clip.has_audio_encoder"),
        )


def _languages(header: Header) -> tuple[str, ...]:
    key = "general.languages"
    found = header.texts(key) if header.count(key) <= _MAX_LANGUAGES else None
    return tuple(one.decode(errors="replace") for one in found or ())


def _n_params(header: Header) -> int:
    return sum(math.prod(one.shape) for one in header.tensors())
