"""Which model a name means: exactly, then without case, then by a unique part, then the default."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from trioserve.errors import AmbiguousModelError, UnknownModelError
from trioserve.models.catalog.entry import ModelEntry, Source

#: Of several quantizations, the one that a name without one means; else the first.
_PREFERRED = ("Q4_K_M", "Q8_0")

#: What Ollama's clients add to a name.
_LATEST = ":latest"

#: Names in an error; a directory may have thousands.
_MAX_NAMES = 20


def find(
    entries: Mapping[str, ModelEntry],
    name: str | None,
    steps: Collection[str],
    default: str | None = None,
) -> ModelEntry:
    """Find the model that a request names.

    Args:
        entries: those that there are.
        name: what the request says; None or empty: nothing.
        steps: beside exact names: "case" ignores case, "part" takes a part of one name only.
        default: the model for no name and for unknown ones. Without it, no name is fine if there is
            only one model beside the bundled one.

    Raises:
        UnknownModelError: there is no such model.
        AmbiguousModelError: the name may mean several.
    """
    if not name:
        return _unnamed(entries, default)
    if (found := _exact(entries, name)) is not None:
        return found
    visible = [one for one in entries.values() if not one.hidden]
    if "case" in steps and (found := _only(name, _without_case(visible, name))) is not None:
        return found
    if (found := _in_repository(visible, name, ignores_case="case" in steps)) is not None:
        return found
    if "part" in steps and (found := _only(name, _with_part(visible, name))) is not None:
        return found
    if default is not None and (found := _exact(entries, default)) is not None:
        return found
    raise UnknownModelError(f"There is no model {name!r}. {_listed(visible)}", param="model")


def _unnamed(entries: Mapping[str, ModelEntry], default: str | None) -> ModelEntry:
    if default is not None and (found := _exact(entries, default)) is not None:
        return found
    visible = [one for one in entries.values() if not one.hidden]
    brought = [one for one in visible if one.source is not Source.BUNDLED] or visible
    if len(brought) == 1:
        return brought[0]
    raise UnknownModelError(f"The request names no model. {_listed(visible)}", param="model")


def _untagged(name: str) -> str:
    return name.removesuffix(_LATEST)


def _exact(entries: Mapping[str, ModelEntry], name: str) -> ModelEntry | None:
    for wanted in (name, _untagged(name)):
        if wanted in entries:
            return entries[wanted]
        for one in entries.values():
            if wanted in one.aliases:
                return one
    return None


def _without_case(entries: Iterable[ModelEntry], name: str) -> list[ModelEntry]:
    wanted = _untagged(name).casefold()
    return [
        one for one in entries if wanted in (each.casefold() for each in (one.name, *one.aliases))
    ]


def _in_repository(
    entries: Iterable[ModelEntry], name: str, *, ignores_case: bool
) -> ModelEntry | None:
    """Of a repository that is named without a quantization, choose what would be downloaded."""
    wanted = _untagged(name)
    own = {}
    for one in entries:
        repo, _, quant = one.name.rpartition(":")
        if repo == wanted or (ignores_case and repo.casefold() == wanted.casefold()):
            own[quant.upper()] = one
    return next((own[quant] for quant in (*_PREFERRED, *own) if quant in own), None)


def _with_part(entries: Iterable[ModelEntry], name: str) -> list[ModelEntry]:
    wanted = _untagged(name).casefold()
    return [
        one
        for one in entries
        if any(wanted in each.casefold() for each in (one.name, *one.aliases))
    ]


def _only(name: str, found: list[ModelEntry]) -> ModelEntry | None:
    if len(found) > 1:
        names = ", ".join(one.name for one in found[:_MAX_NAMES])
        raise AmbiguousModelError(
            f"The model {name!r} may be any of {len(found)}: {names}.", param="model"
        )
    return found[0] if found else None


def _listed(entries: list[ModelEntry]) -> str:
    names = [one.name for one in entries[:_MAX_NAMES]]
    if (rest := len(entries) - len(names)) > 0:
        names.append(f"and {rest} more")
    return f"The models are: {', '.join(names)}."
