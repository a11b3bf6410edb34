"""`Catalog`: all models that a server can offer, and which of them a name means."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import attrs

from trioserve.config import Config, readers
from trioserve.config.checks import NO_SPEECH, OF_SPEECH
from trioserve.config.extras import has_extra
from trioserve.config.keys import Key, check_model
from trioserve.config.parse import Options
from trioserve.errors import (
    AmbiguousModelError,
    ConfigError,
    InvalidRequestError,
    UnknownModelError,
)
from trioserve.left_out import answer_another
from trioserve.models import BUNDLED, BUNDLED_NAME, BUNDLED_PROJECTOR, hub_reference, speech
from trioserve.models.catalog.files import ModelFiles, Source, models_in
from trioserve.models.catalog.presets import (
    Preset,
    Shared,
    of_all,
    read_presets,
    read_upstreams,
    without,
)
from trioserve.models.catalog.upstreams import Upstream
from trioserve.models.gguf import parts_of, total_size
from trioserve.models.hub import HubReference, cached_models, find
from trioserve.models.hub.reference import PREFERRED


@attrs.frozen(kw_only=True)
class ModelEntry:
    """A model that can be served, and how.

    Attributes:
        name: as lists of models show it.
        source: where it is from.
        args: the flags of a server of it: the model, and all that was set for it.
        path: the first GGUF file; None while it has to be downloaded.
        aliases: other names.
        tags: as lists of models show them.
        mmproj: the file beside it for images and sound.
        size: bytes of its files; 0 if unknown.
        version: time and size of the first file, which tell that it was replaced.
        hidden: left out of lists, because another entry has the same file.
        load_on_startup: loaded before the first request.
        stop_timeout: seconds that it has to end.
        upstream: the server that has it; None: it runs here.
        remote_name: its name there.
    """

    name: str
    source: Source
    args: tuple[str, ...]
    path: Path | None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    mmproj: Path | None = None
    size: int = 0
    version: tuple[int, int] | None = None
    hidden: bool = False
    load_on_startup: bool = False
    stop_timeout: float = 10.0
    upstream: Upstream | None = None
    remote_name: str = ""

    @property
    def has_adapters(self) -> bool:
        """True if requests may name LoRA adapters of it."""
        return any(arg.partition("=")[0] in _ADAPTER_FLAGS for arg in self.args)

    @property
    def speaks(self) -> bool:
        """True if a model that speaks is configured for it."""
        return any(flag == "--tts" and it != NO_SPEECH for flag, it in pairwise(self.args))

    def runs_like(self, other: ModelEntry) -> bool:
        """Return True if both have the same flags and the same file."""
        return (self.args, self.path, self.version) == (other.args, other.path, other.version)


_ADAPTER_FLAGS = frozenset({"--lora", "--lora-scaled", "--lora-dir"})


@attrs.frozen
class CatalogChanges:
    """The names whose entries a reload has added, removed, or changed to run differently."""

    added: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


#: The suffix that Ollama's clients add to a name.
_LATEST = ":latest"

#: Names in an error; a directory may have thousands.
_MAX_NAMES = 20


def find_named(
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
    wanted = name.removesuffix(_LATEST)
    folded = wanted.casefold()
    if "case" in steps and (found := _only(visible, name, folded.__eq__)) is not None:
        return found
    if (found := _in_repository(visible, wanted, ignores_case="case" in steps)) is not None:
        return found
    if "part" in steps and (found := _only(visible, name, lambda one: folded in one)) is not None:
        return found
    found = _exact(entries, wanted.rpartition(":")[0])
    if found is not None and found.has_adapters:
        return found  # the rest is the name of an adapter
    if default is not None and (found := _exact(entries, default)) is not None:
        answer_another(name, found.name)
        return found
    raise UnknownModelError(f"There is no model {name!r}. {_listed(visible)}", param="model")


def find_exact(entries: Mapping[str, ModelEntry], name: str) -> ModelEntry:
    """Find the model of exactly this name or alias.

    Raises:
        UnknownModelError: there is no such model.
    """
    if (found := _exact(entries, name)) is None:
        listed = _listed([one for one in entries.values() if not one.hidden])
        raise UnknownModelError(f"There is no model {name!r}. {listed}", param="model")
    return found


def _unnamed(entries: Mapping[str, ModelEntry], default: str | None) -> ModelEntry:
    if default is not None and (found := _exact(entries, default)) is not None:
        return found
    if (found := only_one(entries)) is not None:
        return found
    visible = [one for one in entries.values() if not one.hidden]
    raise UnknownModelError(f"The request names no model. {_listed(visible)}", param="model")


def only_one(entries: Mapping[str, ModelEntry]) -> ModelEntry | None:
    """The only model, or the only one beside the bundled one; None: there are more."""
    visible = [one for one in entries.values() if not one.hidden]
    brought = [one for one in visible if one.source is not Source.BUNDLED] or visible
    return brought[0] if len(brought) == 1 else None


def _exact(entries: Mapping[str, ModelEntry], name: str) -> ModelEntry | None:
    for wanted in (name, name.removesuffix(_LATEST)):
        if wanted in entries:
            return entries[wanted]
        for one in entries.values():
            if wanted in one.aliases:
                return one
    return None


def _only(
    entries: Iterable[ModelEntry], name: str, fits: Callable[[str], bool]
) -> ModelEntry | None:
    """Find the only model with a name that fits, regardless of case.

    Raises:
        AmbiguousModelError: there are several.
    """
    found = [
        one for one in entries if any(fits(each.casefold()) for each in (one.name, *one.aliases))
    ]
    if len(found) > 1:
        names = ", ".join(one.name for one in found[:_MAX_NAMES])
        raise AmbiguousModelError(
            f"The model {name!r} may be any of {len(found)}: {names}.", param="model"
        )
    return found[0] if found else None


def _in_repository(
    entries: Iterable[ModelEntry], wanted: str, *, ignores_case: bool
) -> ModelEntry | None:
    """Of a repository that is named without a quantization, choose what would be downloaded."""
    own = {}
    for one in entries:
        repo, _, quant = one.name.rpartition(":")
        if repo == wanted or (ignores_case and repo.casefold() == wanted.casefold()):
            own[quant.upper()] = one
    return next((own[quant] for quant in (*PREFERRED, *own) if quant in own), None)


def _listed(entries: list[ModelEntry]) -> str:
    names = [one.name for one in entries[:_MAX_NAMES]]
    if (rest := len(entries) - len(names)) > 0:
        names.append(f"and {rest} more")
    return f"The models are: {', '.join(names)}."


_STOP_TIMEOUT = 10.0  # as llama-server's

#: Fields that say which model it is.
_WHICH = frozenset({"model", "hf_repo", "hf_file", "model_url"})


def _bundled() -> ModelFiles:
    projector = BUNDLED_PROJECTOR if BUNDLED_PROJECTOR.exists() else None
    return ModelFiles(BUNDLED_NAME, (BUNDLED,), projector, Source.BUNDLED)


class Catalog:
    """The bundled model, those of the hub's cache and of a directory, and those of presets.

    A model that is in several has what the last of them says. What was set for all models is
    merged into each one's flags: a preset wins over a configuration file and over variables, its
    section over ``[*]``, and the command line over all. Making and reloading a catalog reads
    directories, so it blocks; the entries may be looked at by any thread at any time.

    Args:
        config: where models are, and how requests may name them.
        own_args: the command line, whose flags go to all models.
        environ: the variables, which go to all models, too.

    Raises:
        ConfigError: the directory or the presets cannot be used, a name is there twice, or there
            is no default model of that name.
    """

    def __init__(
        self, config: Config, own_args: Sequence[str] = (), environ: Mapping[str, str] = os.environ
    ) -> None:
        self._config = config
        self._default = default = config.models_default
        self._shared = of_all(own_args, environ)
        #: The environment of the models' processes.
        self.environment = dict(self._shared.environment)
        self._reloading = threading.Lock()
        self._environ = environ
        #: Other servers, by name.
        self.upstreams: Mapping[str, Upstream] = {}
        self._offered: dict[str, ModelEntry] = {}
        #: Flags that were set for models since the start, by the models' names.
        self._set: dict[str, tuple[str, ...]] = {}
        self._entries = self._read()
        self._showing = threading.Lock()
        self._show()
        if (
            default is not None
            and not self.upstreams
            and all(default not in (one.name, *one.aliases) for one in self._entries.values())
        ):
            raise ConfigError(f"models_default: there is no model {default!r}")

    @property
    def entries(self) -> Mapping[str, ModelEntry]:
        """The models by name: those of upstreams, the others in order, and the bundled one."""
        return self._shown

    def _show(self) -> None:
        """Make `entries` again of all that they are made of."""
        with self._showing:
            entries = self._offered | self._entries
            for name, args in self._set.items():
                if (one := self._entries.get(name)) is not None:
                    entries[name] = attrs.evolve(one, args=(*one.args, *args))
            self._shown = MappingProxyType(entries)

    def offer(self, entries: Mapping[str, ModelEntry]) -> None:
        """Offer models of upstreams, in place of those before. One that is here comes first."""
        self._offered = dict(entries)
        self._show()

    def find(self, name: str | None, default: ModelEntry | None = None) -> ModelEntry:
        """Find the model that a request names; see `find_named`. `default` is for unknown names.

        Raises:
            UnknownModelError: there is no such model.
            AmbiguousModelError: the name may mean several.
        """
        answers = self._default or (None if default is None else default.name)
        return find_named(self.entries, name, self._config.models_match, answers)

    def exact(self, name: str) -> ModelEntry:
        """Find the model of exactly this name or alias: for what deletes or unloads it.

        Raises:
            UnknownModelError: there is no such model.
        """
        return find_exact(self.entries, name)

    def set(self, name: str, args: tuple[str, ...]) -> None:
        """Add flags to those of a model, in place of those that were added before.

        Raises:
            UnknownModelError: there is no such model.
        """
        find_exact(self._entries, name)
        self._set = {**self._set, name: args}
        self._show()

    def reload(self) -> CatalogChanges:
        """Look again at everything; returns what is different. Blocks.

        Raises:
            ConfigError: as for the class; the entries then stay as they were.
        """
        with self._reloading:
            before, now = self._entries, self._read()
            self._entries = now
            self._show()
        both = before.keys() & now.keys()
        return CatalogChanges(
            added=frozenset(now.keys() - before.keys()),
            changed=frozenset(name for name in both if not now[name].runs_like(before[name])),
            removed=frozenset(before.keys() - now.keys()),
        )

    def _read(self) -> dict[str, ModelEntry]:
        known = {BUNDLED_NAME: _bundled()}
        known |= {
            one.name: ModelFiles(one.name, one.files, one.mmproj, Source.CACHE)
            for one in cached_models()
        }
        if self._config.models_dir is not None:
            known |= {one.name: one for one in models_in(Path(self._config.models_dir))}
        # Those that speak write no text: --tts names them.
        known = {
            name: one
            for name, one in known.items()
            if one.mmproj is None or not speech.makes_sound(one.mmproj)
        }
        everywhere = Preset()
        sections: Mapping[str, Preset] = {}
        upstreams: Mapping[str, Upstream] = {}
        if self._config.models_preset is not None:
            everywhere, sections = read_presets(path := Path(self._config.models_preset))
            upstreams = read_upstreams(path, self._environ)
        builder = _Builder(self._shared, everywhere)
        entries = [
            builder.entry(name, known.get(name), sections.get(name))
            for name in known.keys() | sections.keys()
        ]
        entries.sort(key=lambda one: (one.source is Source.BUNDLED, one.name.casefold()))
        _check_names(entries)
        self.upstreams = upstreams
        for each in upstreams.values():
            self.environment.pop(each.key_env, None)
        is_alone = len(entries) == 1 and not upstreams
        if is_alone and entries[0].source is Source.BUNDLED:  # there is nothing else
            entries = [attrs.evolve(entries[0], load_on_startup=True)]
        return {
            one.name: attrs.evolve(
                one,
                hidden=one.source is Source.CACHE and one.path in builder.copied,
            )
            for one in entries
        }


def find_for(
    key: Key | None,
    catalog: Catalog,
    name: str | None,
    *,
    exact: bool = False,
    answers: bool = False,
) -> ModelEntry:
    """Find the model that a request names, if its API key may use it.

    Args:
        key: of the client; None: it needs none.
        catalog: has the models.
        name: what the request says; None: nothing.
        exact: the name must be whole, as for what unloads or deletes the model.
        answers: the model is to answer: if it is the only one, it does so to any name.

    Raises:
        UnknownModelError: there is no such model.
        AmbiguousModelError: the name may mean several.
        PermissionDeniedError: the key may not use it.
    """
    # Other servers may have the model that is meant, and not have listed it yet.
    only = only_one(catalog.entries) if answers and not catalog.upstreams else None
    if only is not None and key is not None and not key.may_use(only.name, *only.aliases):
        only = None
    try:
        entry = catalog.exact(name or "") if exact else catalog.find(name, only)
    except (UnknownModelError, AmbiguousModelError) as error:
        if key is None or key.models is None:
            raise
        # The message lists models that the key does not see.
        raise type(error)(
            f"{name!r} is not the name of a model that this API key may use."
            if name
            else "The request must name a model that this API key may use.",
            param="model",
        ) from None
    check_model(key, entry.name, *entry.aliases)
    return entry


class OneModel(Catalog):
    """The model that a configuration names, and no other.

    A request gets it whatever model it asks for, as from a server that has no catalog.

    Args:
        config: what the command line and the variables say.
        own_args: the command line.
        environ: the variables.
        load_on_startup: whether it is loaded before the first request.
    """

    def __init__(
        self,
        config: Config,
        own_args: Sequence[str] = (),
        environ: Mapping[str, str] = os.environ,
        *,
        load_on_startup: bool = True,
    ) -> None:
        self._load_on_startup = load_on_startup
        super().__init__(attrs.evolve(config, models_default=None), own_args, environ)
        self._default = next(iter(self._entries))

    def _read(self) -> dict[str, ModelEntry]:
        named, alias = self._config.model_named, next(iter(self._config.aliases), None)
        found = _bundled() if named is None else None
        name = alias or readers.unicode_name(self._config.hf_repo or Path(named or BUNDLED).name)
        builder = _Builder(self._shared, Preset())
        entry = builder.entry(
            name, found, Preset(self._shared.single, load_on_startup=self._load_on_startup)
        )
        return {entry.name: entry}


class _Builder:
    """Makes entries of what was found and of the presets. `copied`: files of presets that hide."""

    def __init__(self, shared: Shared, everywhere: Preset) -> None:
        self._shared = shared
        self._everywhere = attrs.evolve(everywhere, options=without(everywhere.options, _WHICH))
        self.copied: set[Path | None] = set()

    def entry(self, name: str, found: ModelFiles | None, section: Preset | None) -> ModelEntry:
        """Make the entry of a name.

        Raises:
            ConfigError: it is a section that does not say which model it is.
        """
        own = section or Preset()
        preset = own.over(self._everywhere)
        if own.options.keys() & _WHICH:
            found, which = self._named(name, own.options), dict[str, tuple[str, ...]]()
        elif found is not None:
            which = {"model": ("--model", str(found.files[0]))}
        elif hub_reference(name) is not None:
            which = {"hf_repo": ("--hf-repo", name)}
        else:
            raise ConfigError(f"models_preset: [{name}] is no model that is here, so it needs one "
                              "of the keys model, hf-repo and model-url")  # fmt: skip
        options = {**self._shared.below, **preset.options, **which, **self._shared.above}
        aliases = tuple(one for one in readers.names(_value(options, "alias")) if one != name)
        options["alias"] = ("--alias", ",".join((name, *aliases)))
        path = found.files[0] if found is not None else None
        if preset.dedup and section is not None:
            self.copied |= {path, self._draft(options)}
        if found is not None and found.mmproj is not None and _takes_projector(options):
            options["mmproj"] = ("--mmproj", str(found.mmproj))
        if found is not None and found.source is Source.BUNDLED and _takes_voice(options):
            options["tts"] = ("--tts", str(speech.BUNDLED_VOICE.model))
            options["tts_mmproj"] = ("--tts-mmproj", str(speech.BUNDLED_VOICE.projector))
        if not options.keys().isdisjoint(_OF_EMBEDDINGS):
            options = {**without(options, {"tts"} - own.options.keys())}
        if _value(options, "tts") in ("", NO_SPEECH):  # what is set for all is for the others
            options = {**without(options, OF_SPEECH - own.options.keys())}
        mmproj = _value(options, "mmproj")
        return ModelEntry(
            name=name,
            source=Source.PRESET if section is not None or found is None else found.source,
            args=tuple(word for words in options.values() for word in words),
            path=path,
            aliases=aliases,
            tags=readers.names(_value(options, "tags")),
            mmproj=Path(mmproj) if mmproj else None,
            size=total_size(found.files) if found is not None else 0,
            version=None if path is None else _version(path),
            load_on_startup=bool(preset.load_on_startup),
            stop_timeout=_STOP_TIMEOUT if preset.stop_timeout is None else preset.stop_timeout,
        )

    def _draft(self, options: Options) -> Path | None:
        """Find the file of the draft model, if it is one of the hub that is in the cache."""
        reference = hub_reference(_value(options, "spec_draft_hf"))
        model = None if reference is None else find(reference)
        return None if model is None else model.files[0]

    def _named(self, name: str, options: Options) -> ModelFiles | None:
        """Find the files that a preset names; None if they are not here yet."""
        path, repository = _value(options, "model"), _value(options, "hf_repo")
        reference = None if repository else hub_reference(path)
        if repository:
            try:
                file = _value(options, "hf_file") or None
                reference = HubReference.parse(repository, file=file)
            except InvalidRequestError as error:
                raise ConfigError(f"models_preset: [{name}] {error.message}") from None
        if reference is None:
            if not path or ("model_url" in options and not Path(path).exists()):
                return None
            return ModelFiles(name, parts_of(Path(path)), source=Source.PRESET)
        model = find(reference)
        return None if model is None else ModelFiles(name, model.files, model.mmproj, Source.CACHE)


#: Fields without which a model generates text.
_OF_EMBEDDINGS = ("embeddings", "reranking")


def _takes_projector(options: Options) -> bool:
    """Return True if the projector beside a model can be used, and none is named."""
    is_off = options.get("mmproj_auto", ("--mmproj-auto",)) != ("--mmproj-auto",)
    others = ("mmproj", "mmproj_url", *_OF_EMBEDDINGS)
    return has_extra("media") and not is_off and options.keys().isdisjoint(others)


def _takes_voice(options: Options) -> bool:
    """Return True if the bundled model speaks with the bundled voice."""
    is_free = options.keys().isdisjoint(("tts", *_OF_EMBEDDINGS))
    return is_free and has_extra("speech") and speech.BUNDLED_VOICE.are_there


def _value(options: Options, field: str) -> str:
    """Return what a field is set to, as it was written; empty if it is not."""
    return "".join(options.get(field, ())[1:])


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None  # loading it says why
    return status.st_mtime_ns, status.st_size


def _check_names(entries: Sequence[ModelEntry]) -> None:
    """Raise ConfigError if a name or an alias is there twice."""
    owners: dict[str, str] = {}
    for one in entries:
        for name in {one.name, *one.aliases}:
            if (other := owners.setdefault(name, one.name)) != one.name:
                raise ConfigError(
                    f"models_preset: {name!r} is a name of two models, {other!r} and {one.name!r}"
                )
