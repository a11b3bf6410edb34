"""Models on the hub: how a person names one, and which files of a repository it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Self

import attrs

from trioserve.errors import HubNotFoundError, InvalidRequestError, UnknownQuantError
from trioserve.models.gguf import GgufName
from trioserve.models.head_families import FILE_WORDS

_NAME = r"\w+(?:[.-]\w+)*"
_REPO = re.compile(rf"{_NAME}/{_NAME}", re.ASCII)
_REFERENCE = re.compile(
    rf"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?({_REPO.pattern})(?::([\w.-]+))?", re.ASCII
)
_MAX_LENGTH = 256


@attrs.frozen
class HubReference:
    """A model in a repository of the hub.

    Without `quant` and `file`, the choice is llama-server's: Q4_K_M, else Q8_0, else the first.
    """

    repo: str  # "user/name"
    quant: str | None = None  # "Q4_K_M", in any case
    file: str | None = None  # a path in the repository; wins over `quant`
    #: Types of drafts: a head for the first of them that there is one for, and else a model.
    heads: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, *, file: str | None = None, heads: tuple[str, ...] = ()) -> Self:
        """Read ``user/repo`` or ``user/repo:quant``, with or without ``hf.co/`` in front.

        Raises:
            InvalidRequestError: it is not that.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None or len(match[1]) > _MAX_LENGTH:
            raise InvalidRequestError(
                f"{text[:_MAX_LENGTH]!r} is not a model on the hub: it must be user/repo or "
                "user/repo:quant, such as ggml-org/gemma-3-4b-it-GGUF:Q4_K_M.",
                param="model",
            )
        quant = None if match[2] in (None, "latest") else match[2]  # Ollama adds ":latest"
        return cls(match[1], quant, file, heads)

    def head_in(self, paths: Sequence[str]) -> str | None:
        """Find a head among the files of a repository, if there is one and it is wanted."""
        parts = head_beside(paths, f"x-{self.quant or PREFERRED[0]}.gguf", self.heads)
        return next(iter(parts), None)

    def __str__(self) -> str:
        if self.file is not None:
            return f"{self.repo}/{self.file}"
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def is_repo(text: str) -> bool:
    """Return True for the name of a repository: ``user/repo``."""
    return len(text) <= _MAX_LENGTH and _REPO.fullmatch(text) is not None


#: Quantizations to use when a reference names none, the preferred one first.
PREFERRED = ("Q4_K_M", "Q8_0")

#: A file in llama-server's form, with models of other repositories and flags for them.
_PRESETS = "preset.ini"


def name_of(repo: str, path: str) -> str:
    """Return the name of the model at a path of a repository: ``user/repo:QUANT``."""
    name = GgufName.read(path)
    return repo if name is None or name.quant is None else f"{repo}:{name.quant}"


def choose(paths: Sequence[str], reference: HubReference) -> tuple[str, ...]:
    """Choose a model among the files of a repository; returns the paths of all its parts.

    Raises:
        UnknownQuantError: there are models, but not with this quantization.
        HubNotFoundError: there is no such file, no model, or a part of it is missing.
    """
    first = choose_first(paths, reference)
    parts = GgufName.parts_of(first)
    missing = set(parts).difference(paths)
    if missing:
        raise HubNotFoundError(f"{reference.repo} lacks a part of the model: {min(missing)}.")
    return parts


def choose_first(paths: Sequence[str], reference: HubReference) -> str:
    """Choose a model among the files of a repository; returns the path of its first part.

    Raises:
        UnknownQuantError: there are models, but not with this quantization.
        HubNotFoundError: there is no such file, or no model.
    """
    if reference.file is not None:
        if reference.file not in paths or not reference.file.endswith(".gguf"):
            raise HubNotFoundError(f"{reference.repo} has no GGUF file {reference.file!r}.")
        return reference.file
    if (head := reference.head_in(paths)) is not None:
        return head
    models = models_in(paths)
    if not models and _PRESETS in paths:
        raise HubNotFoundError(
            f"{reference.repo} has no model but presets: download its {_PRESETS}, and name it with "
            "--models-preset."
        )
    if not models:
        raise HubNotFoundError(f"{reference.repo} has no GGUF files that are models.")
    for quant in PREFERRED if reference.quant is None else (reference.quant,):
        pattern = re.compile(re.escape(quant) + "[.-]", re.IGNORECASE)
        if (found := next(filter(pattern.search, models), None)) is not None:
            return found
    if reference.quant is None:
        return next(iter(models))
    known = dict.fromkeys(name.quant or path for path, name in models.items())
    raise UnknownQuantError(
        f"{reference.repo} has no model with the quantization {reference.quant}; it has "
        f"{', '.join(known)}.",
        param="model",
    )


def models_in(paths: Iterable[str]) -> dict[str, GgufName]:
    """Those of the files that are models or first parts of models, by their paths."""
    named = ((path, GgufName.read(path)) for path in paths)
    return {path: name for path, name in named if name is not None and name.is_model}


def projector_beside(paths: Iterable[str], model: str) -> str | None:
    """Find the projector for images (mmproj) that belongs to a model, if there is one."""
    return _beside(paths, model, "mmproj")


def head_beside(
    paths: Sequence[str], model: str, types: Iterable[str] = FILE_WORDS
) -> tuple[str, ...]:
    """Find the head for drafts that belongs to a model: all its parts, or nothing.

    Args:
        paths: the files of a repository.
        model: the path of the model.
        types: those of drafts that it may be for, the preferred one first.
    """
    for word in map(FILE_WORDS.__getitem__, types):
        heads = (path for path in paths if word in path.rpartition("/")[2])
        if (found := _beside(heads, model, word)) is not None:
            parts = GgufName.parts_of(found)
            return parts if set(parts) <= set(paths) else ()
    return ()


def _beside(paths: Iterable[str], model: str, word: str) -> str | None:
    """Find the file with a word in its name that belongs to a model.

    It is the one in the nearest folder on the way up from the model; among several there, the one
    whose weights have about as many bits.
    """
    bits, folder = _bits(model), _folder_of(model)
    found = [
        path
        for path in paths
        if path.endswith(".gguf") and word in path and folder.startswith(_folder_of(path))
    ]
    return min(found, key=lambda path: (-path.count("/"), abs(_bits(path) - bits)), default=None)


def _bits(path: str) -> int:
    name = GgufName.read(path)
    return 0 if name is None else name.bits


def _folder_of(path: str) -> str:
    """The folder of a file, with the slash at its end; empty at the top."""
    return path[: path.rfind("/") + 1]
