"""Chooses what to make drafts with: by the headers of a model's file and of those beside it.

A head is better than n-grams, and one in the model's file takes less memory than one beside it.
N-grams cost next to nothing, so they are there in any case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import attrs

from trioserve.config import Config
from trioserve.config.checks import without_drafts
from trioserve.errors import ModelLoadError
from trioserve.models import gguf, resolve
from trioserve.models.gguf import GgufName
from trioserve.models.head_families import ASSISTED, FAMILIES, FILE_TYPES, FILE_WORDS, refusal
from trioserve.models.hub.reference import head_beside, models_in

_NGRAMS = "ngram-simple"
_SNAPSHOTS = "snapshots"


@attrs.frozen
class _File:
    """The properties of a file that matter for drafts."""

    arch: str
    n_mtp: int  # MTP heads
    has_layers: bool  # other layers
    has_markov: bool

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the headers of all parts; None if one cannot be read."""
        arch, names = "", list[bytes]()
        try:
            for part in gguf.parts_of(path):
                with gguf.read(part) as header:
                    arch = arch or header.text("general.architecture")
                    names += [one.name for one in header.tensors()]
        except (ModelLoadError, OSError):
            return None
        return cls(
            arch=arch,
            n_mtp=sum(name.endswith(b".nextn.eh_proj.weight") for name in names),
            has_layers=b"blk.0.attn_norm.weight" in names,
            has_markov=b"markov_w1.weight" in names,
        )

    @property
    def spec_type(self) -> str | None:
        """The type of drafts that it is for, if it is for drafts alone."""
        if self.has_markov:
            return "draft-dspark"
        if self.n_mtp and not self.has_layers:
            return "draft-mtp"
        return FILE_TYPES.get(self.arch)


@attrs.frozen
class Choice:
    """A configuration without `auto`, and why it makes drafts as it does."""

    config: Config
    reason: str


def choose(config: Config) -> Choice | None:
    """Choose the types of drafts, and find the head; None: nothing is left open.

    Reads headers alone. What cannot be used is not chosen, unless it is named: then loading
    it says why.

    Raises:
        ModelLoadError: no file beside the model has a head of the named type.
    """
    kind, path = config.head_type, config.spec_draft_model
    if "auto" in config.spec_type:
        return _choose(config)
    if kind is None or path is not None:
        return None
    model = resolve(config.model)
    own = _File.read(model) if kind == "draft-mtp" else None
    if own is not None and own.n_mtp:
        return None
    found = find_head(model, (kind,))
    if found is not None:
        reason = f"{kind}: the head in {found.name}, beside the model"
        return Choice(attrs.evolve(config, spec_draft_model=str(found)), reason)
    if kind == "draft-mtp":
        return None  # loading the model says that it has none
    raise ModelLoadError(
        f"spec_type {kind!r} needs a head: name its file with spec_draft_model, or put it beside "
        f"{model} as {FILE_WORDS[kind]}*.gguf."
    )


def _choose(config: Config) -> Choice:
    others = tuple(name for name in config.spec_type if name != "auto") or (_NGRAMS,)
    if config.serves_embeddings:
        return Choice(without_drafts(config), "none: the model generates no text")
    path = config.spec_draft_model
    if path is not None:
        named = _File.read(resolve(path))
        kind = None if named is None else named.spec_type
        reason = f"{kind or 'draft-simple'}: {Path(path).name}, which is named"
    else:
        kind, path, reason = _head(resolve(config.model), config)
    types = others if kind is None else (*others, kind)
    return Choice(attrs.evolve(config, spec_type=types, spec_draft_model=path), reason)


def without_head(config: Config) -> Config:
    """Give a chosen configuration without its head."""
    types = tuple(name for name in config.spec_type if name != config.head_type)
    return attrs.evolve(config, spec_type=types, spec_draft_model=None)


def find_head(model: Path, types: Iterable[str] = FILE_WORDS) -> Path | None:
    """Find the file with a head for these types of drafts that is beside a model.

    In the cache of the hub, that is the best one of the repository's; elsewhere, one whose name is
    the model's, but for the quantization, or any where there is no other model.
    """
    above = (one for one in model.parents if one.parent.name == _SNAPSHOTS)
    root = next(above, model.parent)
    is_repo = root != model.parent or root.parent.name == _SNAPSHOTS
    try:
        found = root.rglob("*.gguf") if is_repo else root.glob("*.gguf")
        paths = sorted(str(path.relative_to(root)) for path in found)
    except OSError:
        return None
    own = str(model.relative_to(root))
    if not is_repo and any(_bare(path) != _bare(own) for path in models_in(paths)):
        paths = [path for path in paths if _bare(path) == _bare(own)]
    parts = head_beside(paths, own, types)
    return root / parts[0] if parts else None


def _head(model: Path, config: Config) -> tuple[str | None, str | None, str]:
    """Find the head for a model: its type, its file if it has one, and why it was chosen."""

    def no(why: str) -> tuple[None, None, str]:
        return None, None, f"{_NGRAMS}: {why}"

    own, beside = _File.read(model), find_head(model)
    if own is None:
        return no("the model's file cannot be read")
    if not own.n_mtp and beside is None:
        return no("the model has no MTP heads, and no head is beside it")
    why = refusal(own.arch, "draft-mtp")
    if own.n_mtp and not why and own.n_mtp <= FAMILIES[own.arch].n_mtp:
        return "draft-mtp", None, "draft-mtp: the model's own MTP heads"
    if beside is None:
        return no(why or f"the model has {own.n_mtp} MTP heads, more than llama.cpp computes")
    found = _File.read(beside)
    kind = None if found is None else found.spec_type
    if found is None or kind is None:
        return no(f"{beside.name} is no head")
    if found.arch in ASSISTED and not config.swa_full:
        return no(f"with --swa-full, the head in {beside.name} could be used")
    if why := refusal(own.arch, kind):
        return no(why)
    return kind, str(beside), f"{kind}: the head in {beside.name}, beside the model"


def _bare(path: str) -> str:
    """Take the mark of a head and the quantization from the name of a file."""
    name = GgufName.read(re.sub("|".join(FILE_WORDS.values()), "", path))
    if name is None:
        return path
    return name.stem.removesuffix((name.quant and name.stem[-len(name.quant) - 1 :]) or "").lower()
