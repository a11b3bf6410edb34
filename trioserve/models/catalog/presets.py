"""Presets."""

from __future__ import annotations

import configparser
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trioserve.config import Config, readers, unsupported
from trioserve.config.flags import BY_NAME, BY_VARIABLE, Flag, switched_off_by
from trioserve.config.parse import CONFIG_VARIABLE, Options, parse
from trioserve.config.readers import FALSE_WORDS, TRUE_WORDS
from trioserve.errors import ConfigError
from trioserve.models.catalog.upstreams import SECTION, Upstream, read_upstream

_log = logging.getLogger("trioserve.models.catalog")

#: Fields of the server that clients talk to. It does not hand them on to those behind it, and a
#: preset cannot set them.
OF_THE_ROUTER = frozenset(
    {
        "host", "port", "reuse_port", "ssl_key_file", "ssl_cert_file", "api_keys",
        "keys_file", "api_key_weights", "api_key_priority", "api_prefix", "static_path", "ui",
        "cors_origins",
        "cors_methods", "cors_headers", "cors_credentials", "allowed_hosts", "predict_route",
        "health_route", "max_connections", "keep_alive_timeout", "models_dir", "models_preset",
        "models_max", "models_memory", "models_autoload", "models_match", "models_default",
        "models_downloads", "store", "store_size", "store_days",
    }
)  # fmt: skip

#: Fields of tools, which run in the process of the router for all models.
OF_TOOLS = frozenset(
    field.name for field in attrs.fields(Config) if field.metadata.get("group") == "Tools"
)


def with_tools_of(config: Config, own: Config) -> Config:
    """Return the configuration of a model with the fields of tools of this process."""
    return attrs.evolve(config, **{name: getattr(own, name) for name in OF_TOOLS})


#: Fields that apply to one model only: a setting for all models is dropped.
_OF_ONE_MODEL = frozenset(
    {
        "model", "hf_repo", "hf_file", "model_url", "mmproj", "mmproj_url", "alias", "tags",
    }
)  # fmt: skip

#: The router writes the log lines of its models.
_LOG_FILE = "log_file"

#: Fields that are passed on only as variables, because every user can see the flags of a process,
#: and what to use for them in a preset.
SECRETS = {"hf_token": "HF_TOKEN in the environment", "mcp_servers_json": "mcp-servers-config"}
_TOKEN = "HF_TOKEN"

#: The variable that Google's Vertex AI sets for the server that clients talk to.
_VERTEX = "AIP_MODE"


def without(options: Options, fields: Collection[str]) -> Options:
    """Return the options without some fields."""
    return {field: words for field, words in options.items() if field not in fields}


def option(key: str, text: str, source: str) -> tuple[str, tuple[str, ...]] | None:
    """Read a key with its value; returns the field, and the words that set it.

    None: it is a flag of llama-server that cannot matter here; a line in the log says why.

    Raises:
        ConfigError: there is no such flag, or it has no such value; the message begins with
            `source`.
    """
    found = _flag(key, text, source)
    if found is None:
        return None
    flag, text = found
    flag.put_text({}, text, source)  # parses it, and raises an error for a bad value
    return flag.field, flag.argv(text)


def _flag(key: str, text: str, source: str) -> tuple[Flag, str] | None:
    """Find the flag of a key. The opposite of a switch is that switch with the opposite value."""
    if (flag := BY_VARIABLE.get(key)) is not None:
        return flag, text
    if (flag := switched_off_by(key)) is not None:
        return flag, "false"  # whatever the text is
    for name in (f"--{key.replace('_', '-')}", f"-{key}"):
        if (flag := BY_NAME.get(name)) is not None:
            return flag, _opposite(text) if name in flag.negative else text
        if name in unsupported.flags():
            _log.warning(unsupported.note(name, source, "flag"))
            return None
    hint = unsupported.did_you_mean(key, [name.lstrip("-") for name in BY_NAME])
    raise ConfigError(f"{source} is not a flag of trioserve{hint}")


def _opposite(text: str) -> str:
    if text in TRUE_WORDS:
        return "false"
    return "true" if text in FALSE_WORDS else text


@attrs.frozen
class Shared:
    """The settings of all models. Presets override `below`, and `above` overrides them.

    `single` has the fields that name a model, if there is only one.
    """

    below: Options
    above: Options
    environment: Mapping[str, str]
    single: Options


def of_all(argv: Sequence[str], environ: Mapping[str, str]) -> Shared:
    """Read what is set for all models: in a file and the environment, and on the command line.

    Raises:
        ConfigError: a value cannot be used.
    """
    parsed = parse(argv, environ)
    dropped = OF_THE_ROUTER | OF_TOOLS | _OF_ONE_MODEL | SECRETS.keys() | {_LOG_FILE}
    both = {**parsed.below, **parsed.options}
    return Shared(
        without(parsed.below, dropped),
        without(parsed.options, dropped),
        environment_of_children(environ, parsed.config),
        {field: both[field] for field in both.keys() & _OF_ONE_MODEL},
    )


def environment_of_children(
    environ: Mapping[str, str], config: Config | None = None
) -> dict[str, str]:
    """Leave out the variables that are passed on as flags, or not at all.

    Secrets are passed on as variables, even if a flag has set them: the token for the hub, the API
    keys, which a model needs for fair queueing and separate caches.
    """
    own = {
        name: text
        for name, text in environ.items()
        if name not in (CONFIG_VARIABLE, _VERTEX)
        and name not in BY_VARIABLE
        and switched_off_by(name) is None
    }
    config = config or Config()
    token = config.hf_token or environ.get(_TOKEN)
    for variable, values in (
        (_TOKEN, (token,) if token else ()),
        ("LLAMA_API_KEY", config.api_keys),
        ("TRIOSERVE_API_KEYS", (config.keys_file,) if config.keys_file else ()),
        ("TRIOSERVE_API_KEY_WEIGHTS", config.api_key_weights),
        ("TRIOSERVE_API_KEY_PRIORITY", config.api_key_priority),
    ):
        if values:
            own[variable] = ",".join(map(str, values))
    return own


_ALL = "*"
#: The section of keys before the first section.
_UNNAMED = "default"
_VERSION = "version"


@attrs.frozen
class Preset:
    """A section. None: it does not say.

    Attributes:
        options: the flags that it sets.
        load_on_startup: load the model before the first request.
        stop_timeout: seconds that the model has to end.
        dedup: hide the model of the cache that has the same file.
    """

    options: Options = attrs.field(factory=dict)
    load_on_startup: bool | None = None
    stop_timeout: float | None = None
    dedup: bool | None = None

    def over(self, other: Preset) -> Preset:
        """Merge two presets. The settings of this one win."""
        own = attrs.asdict(self, recurse=False, filter=lambda _, value: value is not None)
        return attrs.evolve(other, **own | {"options": {**other.options, **self.options}})


def read_presets(path: Path) -> tuple[Preset, Mapping[str, Preset]]:
    """Read a file; returns its settings for all models, and the other sections by name.

    Raises:
        ConfigError: it cannot be read or parsed; the message names the place.
    """
    sections = {
        _canonical(name): _preset(items, f"{path}: [{name}]")
        for name, items in _sections_of(path).items()
        if not name.startswith(SECTION)
    }
    if sections[_UNNAMED] == Preset():
        del sections[_UNNAMED]
    return sections.pop(_ALL, Preset()), sections


def read_upstreams(path: Path, environ: Mapping[str, str]) -> dict[str, Upstream]:
    """Read the upstreams of a file, by name; the variables have their API keys.

    Raises:
        ConfigError: as `read_presets`, or a key is missing.
    """
    return {
        (short := name.removeprefix(SECTION)): read_upstream(
            short, items, f"{path}: [{name}]", environ
        )
        for name, items in _sections_of(path).items()
        if name.startswith(SECTION)
    }


def _sections_of(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Read the keys and values of the sections. Raises ConfigError."""
    text = readers.file(str(path), "models_preset").removeprefix("\ufeff")
    # The names of sections and keys keep their case, the last value of a repeated key counts, and
    # no section is special.
    parser = configparser.RawConfigParser(
        delimiters=("=",), inline_comment_prefixes=(";", "#"), strict=False, default_section=""
    )
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    try:
        parser.read_string(f"[{_UNNAMED}]\n{text}")
    except configparser.ParsingError as error:
        line = error.errors[0][0] - 1 if error.errors else 0
        raise ConfigError(
            f"{path}:{line} is neither a section in brackets nor a key with a value"
        ) from None
    return {name: parser.items(name) for name in parser.sections()}


def _canonical(name: str) -> str:
    """Write the quantization behind a repository as the cache does: ``Q4_K_M``."""
    repo, colon, tag = name.rpartition(":")
    if not colon or "/" not in repo:
        return name
    found = re.search(r"[-.]([A-Za-z0-9_]+)$", tag)
    return f"{repo}:{(found[1] if found else tag).upper()}"


def _preset(items: list[tuple[str, str]], where: str) -> Preset:
    options: dict[str, tuple[str, ...]] = {}
    others: dict[str, Any] = {}
    for key, text in items:
        source = f"{where} {key}"
        if key in _SETTINGS:
            name, reader = _SETTINGS[key]
            others[name] = reader(text, source)
        elif key != _VERSION and (found := option(key, text, source)) is not None:
            if found[0] in SECRETS:
                raise ConfigError(
                    f"{source}: clients can see it here; use {SECRETS[found[0]]} instead"
                )
            options |= [found]
    for field in sorted(options.keys() & OF_TOOLS):
        _log.warning("%s: %s has no effect: tools run in the router, for all models", where, field)
    return Preset(without(options, OF_THE_ROUTER | OF_TOOLS), **others)


def _seconds(text: str, source: str) -> float:
    try:
        value = readers.number(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{source} must be a number of seconds, not {text}")
    return value


#: Keys that are not flags: the field of `Preset`, and its parser.
_SETTINGS: Mapping[str, tuple[str, Any]] = {
    "load-on-startup": ("load_on_startup", readers.is_on),
    "stop-timeout": ("stop_timeout", _seconds),
    "dedup-cache-models": ("dedup", readers.is_on),
}
