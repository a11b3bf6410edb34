"""The arguments of an application, checked and made into a configuration for each model.

All that can be wrong is found here, where the application is built, and not on the machine that a
replica is started on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from trioserve.config import Config
from trioserve.config.flags import BY_VARIABLE
from trioserve.config.parse import Options, argv_of, parse
from trioserve.errors import ConfigError
from trioserve.models.catalog.presets import OF_TOOLS, option

#: A configuration, the arguments of a command line, or a mapping of flags (without dashes) to
#: values, as in a presets file.
Settings: TypeAlias = Config | Sequence[str] | Mapping[str, Any]

#: Fields of a server that listens on an address, or chooses among models.
_UNUSED = frozenset(
    {
        "host", "port", "reuse_port", "ssl_key_file", "ssl_cert_file", "api_prefix",
        "predict_route", "health_route", "max_connections", "keep_alive_timeout", "models_dir",
        "models_preset", "models_max", "models_memory", "models_autoload", "models_default",
        "models_downloads",
    }
)  # fmt: skip

#: Fields that clients see, whatever the model, and those of tools: they are the same for all.
_SHARED = OF_TOOLS | frozenset(
    {
        "api_keys", "keys_file", "api_key_weights", "api_key_priority", "allowed_hosts",
        "cors_origins", "cors_methods", "cors_headers", "cors_credentials", "max_body_size",
        "max_request_memory",
        "models_match", "timeout", "ui", "ui_config", "static_path", "metrics_endpoint",
    }
)  # fmt: skip

#: Names of models become parts of the names of deployments, where these mean something else.
_MEANS_SOMETHING = str.maketrans("/#:?&= ", "-------")


@attrs.frozen(kw_only=True)
class Model:
    """A model of an application.

    Attributes:
        settings: the configuration of its server.
        replicas: how many servers of it run, each with its copy of the model in memory.
        autoscaling: fields of Serve's `AutoscalingConfig`, in place of a number of replicas.
        deployment: further options of Serve's deployment, such as `ray_actor_options`.
    """

    settings: Settings
    replicas: int | None = None
    autoscaling: Mapping[str, Any] | None = None
    deployment: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Served:
    """A model as it will be served: `config` is complete."""

    name: str
    config: Config
    replicas: int
    autoscaling: Mapping[str, Any] | None
    deployment: Mapping[str, Any]
    is_single: bool = False

    @property
    def aliases(self) -> tuple[str, ...]:
        """The aliases beside the first one."""
        return self.config.aliases[1:]

    @property
    def deployment_name(self) -> str:
        """The name of its deployment."""
        return f"model-{self.name.translate(_MEANS_SOMETHING)}"


def read_models(
    models: Mapping[str, Model | Settings],
    settings: Settings,
    environ: Mapping[str, str],
    *,
    replicas: int,
    autoscaling: Mapping[str, Any] | None,
) -> tuple[Served, ...]:
    """Check the models of an application, and the settings for all of them.

    Raises:
        ConfigError: a value cannot be used; the message names it and its place.
    """
    if not models:
        raise ConfigError("models is empty: there is nothing to serve")
    shared = _options(settings, "settings")
    used = {name: text for name, text in environ.items() if _is_used(name)}
    served = []
    for name, given in models.items():
        if not isinstance(name, str) or not name.strip() or "," in name:
            raise ConfigError(f"models: {name!r} cannot be the name of a model")
        model = given if isinstance(given, Model) else _read(given, name)
        own = _options(model.settings, name)
        _check(model, name)
        served.append(
            Served(
                name=name,
                config=_config(name, {**shared, **own}, used, model.deployment),
                replicas=replicas if model.replicas is None else model.replicas,
                autoscaling=model.autoscaling
                if model.autoscaling is not None or model.replicas is not None
                else autoscaling,
                deployment=dict(model.deployment),
            )
        )
    _check_together(served)
    return tuple(served)


def _is_used(variable: str) -> bool:
    flag = BY_VARIABLE.get(variable)
    return flag is None or flag.field not in _UNUSED


def _read(given: Settings, name: str) -> Model:
    """Read what stands for a model. In a mapping, some keys are not flags but `Model`'s own."""
    if not isinstance(given, Mapping):
        return Model(settings=given)
    own = {key: given[key] for key in ("replicas", "autoscaling", "deployment") if key in given}
    for key in ("autoscaling", "deployment"):
        if not isinstance(own.get(key, {}), Mapping):
            raise ConfigError(f"{name}: {key} must be a mapping, not {own[key]!r}")
    return Model(settings={key: given[key] for key in given if key not in own}, **own)


def _check(model: Model, name: str) -> None:
    if not isinstance(model.deployment.get("ray_actor_options", {}), Mapping):
        raise ConfigError(f"{name}: ray_actor_options must be a mapping")
    if model.replicas is not None:
        check_number(f"{name}: replicas", model.replicas)
        if model.autoscaling is not None:
            raise ConfigError(f"{name}: replicas and autoscaling cannot be given together")


def check_number(name: str, value: object) -> None:
    """Raise ConfigError if a value is no integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")


def _options(settings: Settings, where: str) -> Options:
    """Take settings apart by the fields that they set.

    Raises:
        ConfigError: they are wrong, or mean nothing in an application.
    """
    if isinstance(settings, Config):
        options: Options = parse(argv_of(settings), {}).options
    elif isinstance(settings, Mapping):
        options = _of_mapping(settings, where)
    elif isinstance(settings, Sequence) and not isinstance(settings, str | bytes):
        options = _of_words(settings, where)
    else:
        raise ConfigError(
            f"{where} must be a Config, a list of flags or a mapping, not {settings!r}"
        )
    if unused := sorted(_UNUSED & set(options)):
        raise ConfigError(f"{where}: {unused[0]} has no meaning in a Ray Serve application")
    return options


def _of_words(words: Sequence[Any], where: str) -> Options:
    try:
        parsed = parse([str(word) for word in words], {})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    if parsed.action != "serve" or parsed.file is not None:
        raise ConfigError(f"{where}: {' '.join(map(str, words))} does not say how to serve a model")
    return parsed.options


def _of_mapping(settings: Mapping[Any, Any], where: str) -> Options:
    options: dict[str, tuple[str, ...]] = {}
    for key, value in settings.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            words = str(text).lower() if isinstance(text, bool) else str(text)
            found = option(str(key), words, f"{where}: {key}")
            if found is not None:
                field, more = found
                before = options.get(field, ()) if isinstance(value, list | tuple) else ()
                options[field] = (*before, *more)
    return options


def _config(
    name: str, options: Options, environ: Mapping[str, str], deployment: Mapping[str, Any]
) -> Config:
    argv = [word for words in options.values() for word in words]
    try:
        config = parse(argv, environ).config
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from None
    aliases = dict.fromkeys((name, *config.aliases))
    n_cpus = int(deployment.get("ray_actor_options", {}).get("num_cpus") or 0)
    threads = n_cpus if config.threads == -1 and n_cpus >= 1 else config.threads
    return attrs.evolve(config, alias=",".join(aliases), log_format="json", threads=threads)


def _check_together(served: Sequence[Served]) -> None:
    """Check what several models must agree on. Raises ConfigError."""
    names: dict[str, str] = {}
    deployments: dict[str, str] = {}
    for one in served:
        for name in one.config.aliases:
            if (other := names.setdefault(name, one.name)) != one.name:
                raise ConfigError(f"{name!r} is a name of two models: {other!r} and {one.name!r}")
        if (other := deployments.setdefault(one.deployment_name, one.name)) != one.name:
            raise ConfigError(f"the names {other!r} and {one.name!r} are too much alike")
        for field in sorted(_SHARED):
            if getattr(one.config, field) != getattr(served[0].config, field):
                raise ConfigError(f"{one.name}: {field} must be the same for all models")
