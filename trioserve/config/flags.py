"""The table of flags: how each is written, and the field of `Config` that it sets.

It is made from the fields of `Config`, so a new field is a new flag without more code. The command
line, the environment, a file, ``--help`` and the reference in ``docs/`` all read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from trioserve.config import checks, readers
from trioserve.config.config import Config
from trioserve.config.option import KINDS, split_names
from trioserve.config.readers import TRUE_WORDS
from trioserve.errors import ConfigError, InvalidRequestError
from trioserve.types import SamplingParams


@attrs.frozen(kw_only=True)
class Flag:
    """One way to set a field: a flag with all its names, and its variable.

    `field` names a field of `Config`, or ``sampling.name`` one of `SamplingParams`. `read` turns
    text into a value; a switch has none, and sets `on` or, by a negative name, `off`.
    """

    field: str
    attribute: attrs.Attribute[Any] = attrs.field(repr=False)
    names: tuple[str, ...]
    negative: tuple[str, ...]
    variable: str | None
    group: str
    help: str
    read: readers.Reader | None
    synonyms: Mapping[str, str] = {}
    on: Any = True
    off: Any = False
    choices: tuple[str, ...] | None = None
    adds: bool = False  # using it twice adds up; otherwise the last one counts
    sets: Mapping[str, Any] = {}  # fields that a preset sets when it is switched on

    @property
    def default(self) -> Any:
        return self.attribute.default

    def put(self, values: dict[str, Any], value: Any) -> None:
        if self.sets:
            values.update(self.sets if value else {})
        else:
            values[self.field] = (*values.get(self.field, ()), *value) if self.adds else value

    def put_text(self, values: dict[str, Any], text: str, source: str) -> None:
        """Parse text, and set the field. For a switch, the text is a word for on or off.

        Raises:
            ConfigError: the text is invalid for the field; the message begins with `source`.
        """
        if self.read is None:
            self.put(values, self.on if readers.is_on(text, source) else self.off)
            return
        try:
            value = self.read(self.synonyms.get(text, text))
            if self.attribute.validator is not None:
                self.attribute.validator(None, self.attribute, value)
        except (ConfigError, InvalidRequestError) as error:
            message = error.message.rstrip(".")
            own = re.sub(rf"^'?{self.attribute.name}'?(?= )", source, message)
            raise ConfigError(own if own != message else f"{source}: {message}") from None
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
        self.put(values, value)

    def argv(self, text: str) -> tuple[str, ...]:
        """The words of a command line that set the field to a text.

        For a switch, `text` is as for `put_text`. Empty if no flag switches it off.
        """
        if self.read is not None:
            return (self.names[-1], text)
        return self.names[-1:] if text in TRUE_WORDS else self.negative[-1:]


def _flag(field: str, names: str, help: str, **rest: Any) -> Flag:
    """Make a flag of a field; defaults for `rest` follow from the field's type."""
    owner, name = (SamplingParams, field[9:]) if field.startswith("sampling.") else (Config, field)
    attribute = attrs.fields_dict(owner)[name]
    flags, negative, variable = split_names(names)
    kind = str(attribute.type)
    defaults = {
        "group": attribute.metadata.get("group", "Sampling"),
        "read": KINDS[kind][2] if kind in KINDS else None,
        "adds": kind.startswith("tuple"),
    }
    return Flag(
        field=field, attribute=attribute, names=flags, negative=negative, variable=variable,
        help=help, **defaults | rest,
    )  # fmt: skip


def _flags_of_fields() -> Iterator[Flag]:
    for field in attrs.fields(Config):
        if field.metadata:
            own = {name: value for name, value in field.metadata.items() if name != "check"}
            flag = f"--{field.name.replace('_', '-')} TRIOSERVE_{field.name.upper()}"
            yield _flag(field.name, own.pop("flags") or flag, **own)
    for field in attrs.fields(SamplingParams):
        if field.metadata:
            yield _flag(f"sampling.{field.name}", field.metadata["flags"], field.metadata["help"])


#: Further flags of a field, which set it in another way.
# fmt: off
_OTHER_FLAGS = (
    _flag("sampling.samplers", "--samplers", read=readers.samplers, adds=False,
        help="samplers in the order in which they are applied, separated by semicolons"),
    _flag("sampling.samplers", "--sampler-seq --sampling-seq",
        read=readers.sampler_letters, adds=False,
        help="the same as --samplers, with a letter for each sampler"),
    _flag("sampling.dry_sequence_breakers", "--dry-sequence-breaker", read=readers.dry_breaker,
        help="DRY: string at which a repetition ends, instead of the default ones; may be given "
        "several times; none = no such string"),
    _flag("sampling.logit_bias", "-l --logit-bias", read=readers.logit_bias,
        help="token id and what to add to its logit, such as 15043+1 or 15043-1; may be given "
        "several times"),
    _flag("grammar", "--grammar-file", read=readers.file,
        help="file with a GBNF grammar, instead of --grammar"),
    _flag("json_schema", "-jf --json-schema-file", read=readers.file,
        help="file with a JSON Schema, instead of --json-schema"),
    _flag("lora", "--lora-scaled", read=readers.scaled_paths,
        help="LoRA adapters to load, each as PATH:SCALE, separated by commas"),
    _flag("control_vector", "--control-vector-scaled", read=readers.scaled_paths,
        help="control vectors to add, each as PATH:SCALE, separated by commas"),
    _flag("spec_type", "--spec-default", read=None, on=("ngram-mod",), adds=False,
        help="the same as --spec-type ngram-mod"),
    _flag("rope_freq_scale", "--rope-scale LLAMA_ARG_ROPE_SCALE", read=readers.inverse,
        help="factor that extends the context: 1 divided by --rope-freq-scale"),
    _flag("api_keys", "--api-key-file LLAMA_ARG_API_KEY_FILE", read=readers.file_of_keys,
        help="file with an API key on each line; lines that begin with # are comments"),
    _flag("ui_config", "--ui-config-file --webui-config-file LLAMA_ARG_UI_CONFIG_FILE",
        read=readers.file, help="file with such a JSON object, instead of --ui-config"),
    _flag("chat_template", "--chat-template-file LLAMA_ARG_CHAT_TEMPLATE_FILE",
        read=readers.file, help="file with the Jinja source of a chat template"),
    _flag("log_format", "--log-jsonl | --no-log-jsonl LLAMA_ARG_LOG_JSONL",
        read=None, on="json", off="auto", help="the same as --log-format json"),
    _flag("log_level", "--log-disable", read=None, on="off", off="info",
        help="the same as --log-level off"),
    _flag("log_level", "-v --verbose --log-verbose", read=None, on="debug", off="info",
        help="the same as --log-level debug"),
    _flag("log_level", "-lv --verbosity --log-verbosity LLAMA_ARG_LOG_VERBOSITY",
        read=readers.log_level,
        help="log level as a number; 0 or 1 = error, 2 = warning, 3 = info, 4 or more = debug"),
)
# fmt: on


# -- presets: llama-server's, each a model on the hub and settings for it

_Fields = Mapping[str, Any]

_INFILL: _Fields = {"port": 8012, "ubatch_size": 1024, "batch_size": 1024, "ctx_size": 0}
_GPT_OSS: _Fields = {
    "port": 8013, "ubatch_size": 2048, "batch_size": 32768, "parallel": 2, "ctx_size": 2 * 131072,
    "sampling.temperature": 1.0, "sampling.top_p": 1.0, "sampling.top_k": 0,
    "sampling.min_p": 0.01,
}  # fmt: skip
_GEMMA: _Fields = {"port": 8014, "ctx_size": 0}
_EMBEDDING: _Fields = {
    "port": 8011, "ubatch_size": 2048, "batch_size": 2048, "parallel": 32, "ctx_size": 32 * 2048,
    "embeddings": True,
}  # fmt: skip
_DRAFT: _Fields = {"spec_draft_hf": "ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF"}


def _hub(repo: str, file: str | None, *settings: _Fields) -> _Fields:
    fields: dict[str, Any] = {"hf_repo": f"ggml-org/{repo}-GGUF"}
    if file is not None:
        fields["hf_file"] = f"{file}.gguf"
    for each in settings:
        fields |= each
    return fields


def _coder(size: str, *settings: _Fields) -> _Fields:
    file = f"qwen2.5-coder-{size.lower()}-q8_0"
    return _hub(f"Qwen2.5-Coder-{size}-Q8_0", file, *settings, _INFILL)


#: Each with what it is, and the fields that it sets.
# fmt: off
PRESETS: Mapping[str, tuple[str, _Fields]] = {
    "--embd-gemma-default": ("EmbeddingGemma 300M, for embeddings",
        _hub("embeddinggemma-300M-qat-q4_0", "embeddinggemma-300M-qat-Q4_0", _EMBEDDING)),
    "--fim-qwen-1.5b-default": ("Qwen 2.5 Coder 1.5B, for infill", _coder("1.5B")),
    "--fim-qwen-3b-default": ("Qwen 2.5 Coder 3B, for infill", _coder("3B")),
    "--fim-qwen-7b-default": ("Qwen 2.5 Coder 7B, for infill", _coder("7B")),
    "--fim-qwen-7b-spec": (
        "Qwen 2.5 Coder 7B, for infill, with a draft model", _coder("7B", _DRAFT)),
    "--fim-qwen-14b-spec": (
        "Qwen 2.5 Coder 14B, for infill, with a draft model", _coder("14B", _DRAFT)),
    "--fim-qwen-30b-default": ("Qwen 3 Coder 30B A3B, for infill",
        _hub("Qwen3-Coder-30B-A3B-Instruct-Q8_0", "qwen3-coder-30b-a3b-instruct-q8_0", _INFILL)),
    "--gpt-oss-20b-default": ("gpt-oss 20B", _hub("gpt-oss-20b", "gpt-oss-20b-mxfp4", _GPT_OSS)),
    "--gpt-oss-120b-default": ("gpt-oss 120B", _hub("gpt-oss-120b", None, _GPT_OSS)),
    "--vision-gemma-4b-default": ("Gemma 3 4B", _hub("gemma-3-4b-it-qat", None, _GEMMA)),
    "--vision-gemma-12b-default": ("Gemma 3 12B", _hub("gemma-3-12b-it-qat", None, _GEMMA)),
}
# fmt: on


def _preset(name: str, about: str, fields: Mapping[str, Any]) -> Flag:
    settings = ", ".join(f"{field.rpartition('.')[2]} {value}" for field, value in fields.items())
    help = f"{about}; the same as {settings}"
    return _flag("hf_repo", name, help, group="Presets", read=None, sets=fields)


_BY_FIELD = tuple(_flags_of_fields())

#: The headings that flags are listed under, in the order of the fields of `Config`.
GROUPS = (*dict.fromkeys(flag.group for flag in _BY_FIELD), "Presets")

#: Every flag; within a group in the order of the fields.
FLAGS: tuple[Flag, ...] = tuple(
    sorted(
        (
            *_BY_FIELD,
            *_OTHER_FLAGS,
            *(_preset(name, about, fields) for name, (about, fields) in PRESETS.items()),
        ),
        key=lambda flag: GROUPS.index(flag.group),
    )
)

#: The fields whose values no other process is shown, nor a terminal. Entries of MCP servers hold
#: tokens.
SECRETS = ("api_keys", "hf_token", "mcp_servers_json")

#: Their variables.
SECRET_VARIABLES = (
    *(one.variable for one in FLAGS if one.field in SECRETS and one.variable is not None),
    *checks.WEB_SEARCH_KEYS.values(),
)

#: The first flag of each field, in the order of `FLAGS`.
BY_FIELD: dict[str, Flag] = {}
for _one in FLAGS:
    BY_FIELD.setdefault(_one.field, _one)

BY_NAME: Mapping[str, Flag] = {name: one for one in FLAGS for name in (*one.names, *one.negative)}
BY_VARIABLE: Mapping[str, Flag] = {one.variable: one for one in FLAGS if one.variable is not None}


#: The longest name of the flag of each field.
_LONGEST = {flag.attribute.name: flag.names[-1] for flag in reversed(_BY_FIELD)}

#: Names of fields in a message that cannot be plain words.
_FIELDS = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")


def as_flags(message: str, sources: Mapping[str, str] | None = None) -> str:
    """Write a message about fields for a user, who knows them as flags.

    Args:
        message: of an error, with names of fields.
        sources: the flag, the variable or the line of a file that has set each field. With them,
            the message is one of a `Config`, which may begin with a name that is a plain word.
    """

    def name_of(field: str) -> str:
        return (sources or {}).get(field) or _LONGEST.get(field, field)

    first, space, rest = message.partition(" ")
    if sources is not None and "_" not in first:
        first = name_of(first.rstrip(":")) + ":" * first.endswith(":")
    return _FIELDS.sub(lambda found: name_of(found[0]), f"{first}{space}{rest}")


def switched_off_by(variable: str) -> Flag | None:
    """The switch that a variable such as ``LLAMA_ARG_NO_JINJA`` switches off."""
    flag = BY_VARIABLE.get(without_no(variable))
    return flag if flag is not None and flag.read is None else None


def without_no(variable: str) -> str:
    """``LLAMA_ARG_NO_X`` switches off what ``LLAMA_ARG_X`` switches on."""
    return variable.replace("LLAMA_ARG_NO_", "LLAMA_ARG_", 1)
