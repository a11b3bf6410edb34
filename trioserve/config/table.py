"""The table of options: how each is written, and the field of `Config` that it sets.

It is made from the fields of `Config`, so a new field is a new flag without more code. The command
line, the environment, a file, ``--help`` and the reference in ``docs/`` all read it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trioserve.config.config import GROUPS, SAMPLING_OPTIONS, SAMPLING_VARIABLES, Config
from trioserve.types import SAMPLER_LETTERS, SamplingParams

#: What a variable says to switch something on or off.
TRUE_WORDS = frozenset({"on", "enabled", "true", "1"})
FALSE_WORDS = frozenset({"off", "disabled", "false", "0"})

#: Words that stand for a value of a field.
WORDS: Mapping[str, Mapping[str, str]] = {
    "n_gpu_layers": {"auto": "-1", "all": "-1"},
    "parallel": {"-1": str(attrs.fields(Config).parallel.default)},
    "cache_ram": {"-1": str(2**40)},
    "flash_attn": {
        **dict.fromkeys(TRUE_WORDS, "on"),
        **dict.fromkeys(FALSE_WORDS, "off"),
        "-1": "auto",
    },
    "reasoning": {
        **dict.fromkeys(TRUE_WORDS, "on"),
        **dict.fromkeys(FALSE_WORDS, "off"),
        "-1": "auto",
    },
}


@attrs.frozen(kw_only=True)
class Setting:
    """One option: how it is written, and the field that it sets.

    `field` names a field of `Config`, or ``sampling.name`` one of `SamplingParams`. `read` turns
    text into a value; a switch has none, and sets `on` or, by a negative flag, `off`.
    """

    field: str
    flags: tuple[str, ...]
    negative: tuple[str, ...] = ()
    variable: str | None = None
    group: str
    help: str
    read: Callable[[str], Any] | None
    on: Any = True
    off: Any = False
    choices: tuple[str, ...] | None = None
    adds: bool = False  # using it twice adds up; otherwise the last one counts

    @property
    def default(self) -> Any:
        """What the field is when nobody sets it."""
        value: Any = Config()
        for name in self.field.split("."):
            value = getattr(value, name)
        return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(",") if key.strip())


def _file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path} cannot be read: {reason}") from None


def _key_file(path: str) -> tuple[str, ...]:
    lines = (line.strip() for line in _file(path).splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _row(text: str) -> tuple[str, ...]:
    """A line of CSV, because patterns and texts may hold a comma, in quotes."""
    try:
        return tuple(next(csv.reader([text], strict=True), ()))
    except csv.Error as error:
        raise ValueError(f"{text!r} cannot be read: {error}") from None


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(number) for number in re.split("[,/]", text))


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


def _unescape(text: str) -> str:
    """Read ``\\n`` and the like as in C; what is no escape stays."""

    def one(match: re.Match[str]) -> str:
        byte, letter = match.groups()
        return chr(int(byte, 16)) if byte else _ESCAPES[letter]

    return re.sub(r"""\\(?:x([0-9a-fA-F]{2})|([nrt\\'"]))""", one, text)


def _word(text: str) -> tuple[str, ...]:
    return (_unescape(text),)


def _samplers(text: str) -> tuple[str, ...]:
    return tuple(name.strip().replace("-", "_") for name in text.split(";") if name.strip())


def _sampler_letters(text: str) -> tuple[str, ...]:
    unknown = sorted(set(text) - set(SAMPLER_LETTERS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} stands for no sampler; use {''.join(SAMPLER_LETTERS)}")
    return tuple(SAMPLER_LETTERS[letter] for letter in text)


def _breaker(text: str) -> tuple[str, ...]:
    return () if text == "none" else _word(text)


def _bias(text: str) -> tuple[tuple[int, float], ...]:
    for sign in "+-":
        token, found, bias = text.partition(sign)
        if found and token.isdecimal():
            return ((int(token), _number(sign + bias)),)
    raise ValueError(f"{text!r} must be a token id, + or -, and a number, such as 15043+1")


def _scaled_paths(text: str) -> tuple[str, ...]:
    for path in _row(text):
        name, _, scale = path.rpartition(":")
        if not name:
            raise ValueError(f"{path!r} must be a path, a colon and a number")
        _number(scale)
    return _row(text)


def _inverse(text: str) -> float:
    number = _number(text)
    if not number > 0:
        raise ValueError(f"{text!r} must be above 0")
    return 1 / number


def _verbosity(text: str) -> str:
    """llama-server's numbers: 0 output only, 1 error, 2 warning, 3 info, 4 and more debug."""
    level = _integer(text)
    return ("error", "error", "warning", "info")[max(level, 0)] if level <= 3 else "debug"


# -- the table


_READERS: Mapping[str, Callable[[str], Any] | None] = {
    "bool": None,
    "int": _integer,
    "float": _number,
    "str": str,
    "str | None": str,
    "tuple[str, ...]": _keys,
    "tuple[float, ...]": _numbers,
}

#: Fields whose text is read in another way than their type says.
_OWN_READERS: Mapping[str, Callable[[str], Any]] = {
    "override_kv": _row,
    "override_tensor": _row,
    "stop": _word,
    "lora": _row,
    "api_prefix": lambda text: text.rstrip("/"),
}


def _negative(flags: tuple[str, ...]) -> tuple[str, ...]:
    """``--x`` is switched off by ``--no-x``, and ``-xy`` by ``-no-xy``."""
    return tuple(
        f"--no-{flag[2:]}" if flag.startswith("--") else f"-no-{flag[1:]}" for flag in flags
    )


def _own(field: str, type_name: str, **rest: Any) -> Setting:
    reader = _OWN_READERS.get(field) or _READERS[type_name]
    off = rest.pop("off", None)
    negative = _negative(rest["flags"]) if off is None and reader is None else off or ()
    adds = type_name.startswith("tuple")
    return Setting(field=field, negative=negative, read=reader, adds=adds, **rest)


_CONFIG_FIELDS: tuple[attrs.Attribute[Any], ...] = tuple(attrs.fields(Config))


def _make_settings() -> tuple[Setting, ...]:
    settings = [
        _own(field.name, str(field.type), **_described(field.metadata))
        for field in sorted(_CONFIG_FIELDS, key=_group_of)
        if field.metadata
    ]
    types = {field.name: str(field.type) for field in attrs.fields(SamplingParams)}
    for name, (flags, text) in SAMPLING_OPTIONS.items():
        variable = SAMPLING_VARIABLES.get(name)
        about = {"flags": flags, "variable": variable, "group": "Sampling", "help": text}
        settings.append(_own(f"sampling.{name}", types[name], **about))
    return (*settings, *_OTHER_WAYS)


def _group_of(field: attrs.Attribute[Any]) -> int:
    return GROUPS.index(field.metadata["group"]) if field.metadata else 0


def _described(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: metadata[name] for name in ("flags", "group", "help", "choices")}
    return {**kept, "variable": metadata["env"], "off": metadata["negative"]}


def _also(
    field: str, *flags: str, group: str, help: str, read: Callable[[str], Any] | None, **rest: Any
) -> Setting:
    return Setting(field=field, flags=flags, group=group, help=help, read=read, **rest)


#: Flags that set a field in another way than its own flag does, or have no field of their own.
_OTHER_WAYS = (
    _also(
        "sampling.samplers",
        "--samplers",
        group="Sampling",
        help="samplers in their order, separated by ;",
        read=_samplers,
    ),
    _also(
        "sampling.samplers",
        "--sampler-seq",
        "--sampling-seq",
        group="Sampling",
        help="the same in letters",
        read=_sampler_letters,
    ),
    _also(
        "sampling.dry_sequence_breakers",
        "--dry-sequence-breaker",
        group="Sampling",
        help="text that DRY does not look across, instead of the usual ones; none: no such text",
        read=_breaker,
        adds=True,
    ),
    _also(
        "sampling.logit_bias",
        "-l",
        "--logit-bias",
        group="Sampling",
        help="token id, + or -, and what is added to its logit, such as 15043+1",
        read=_bias,
        adds=True,
    ),
    _also(
        "grammar",
        "--grammar-file",
        group="Sampling",
        help="file with such a grammar",
        read=_file,
    ),
    _also(
        "json_schema",
        "-jf",
        "--json-schema-file",
        group="Sampling",
        help="file with such a schema",
        read=_file,
    ),
    _also(
        "lora",
        "--lora-scaled",
        group="Model",
        help="the same, each PATH:SCALE",
        read=_scaled_paths,
        adds=True,
    ),
    _also(
        "rope_freq_scale",
        "--rope-scale",
        group="Long contexts",
        help="how many times longer the context is to be: 1 divided by --rope-freq-scale",
        read=_inverse,
        variable="LLAMA_ARG_ROPE_SCALE",
    ),
    _also(
        "api_keys",
        "--api-key-file",
        group="Server",
        help="file with keys, one a line; lines that begin with # are not read",
        read=_key_file,
        variable="LLAMA_ARG_API_KEY_FILE",
        adds=True,
    ),
    _also(
        "chat_template",
        "--chat-template-file",
        group="Server",
        help="file with the Jinja text of a chat template",
        read=_file,
        variable="LLAMA_ARG_CHAT_TEMPLATE_FILE",
    ),
    _also(
        "log_format",
        "--log-jsonl",
        group="Logs",
        help="the same as --log-format json",
        read=None,
        on="json",
        off="auto",
        negative=("--no-log-jsonl",),
        variable="LLAMA_ARG_LOG_JSONL",
    ),
    _also(
        "log_level",
        "--log-disable",
        group="Logs",
        help="the same as --log-level off",
        read=None,
        on="off",
        off="info",
    ),
    _also(
        "log_level",
        "-v",
        "--verbose",
        "--log-verbose",
        group="Logs",
        help="the same as --log-level debug",
        read=None,
        on="debug",
        off="info",
    ),
    _also(
        "log_level",
        "-lv",
        "--verbosity",
        "--log-verbosity",
        group="Logs",
        help="the level as a number: 0 and 1 error, 2 warning, 3 info, 4 and more debug",
        read=_verbosity,
        variable="LLAMA_ARG_LOG_VERBOSITY",
    ),
)

#: Every option, in the order of the fields of `Config`.
SETTINGS: tuple[Setting, ...] = _make_settings()
