"""Checks of the fields of a `Config`, beyond a type, choices and bounds.

A check of one field, or of each text in it, gets the value and the name of the field. Others look
at several fields. All raise `ConfigError`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.config.extras import has_extra
from trioserve.config.readers import names as read_names, parse_json
from trioserve.errors import ConfigError

if TYPE_CHECKING:
    from trioserve.config.config import Config

#: The tools that are built in, by the names that llama-server gives them, in its order.
BUILTIN_TOOLS = (
    "read_file", "file_glob_search", "grep_search", "exec_shell_command", "write_file",
    "edit_file", "get_info",
)  # fmt: skip

#: Stands for all of them in `tools`.
ALL_TOOLS = "all"

#: Stands for no model in `tts`.
NO_SPEECH = "none"

#: The fields that need such a model.
OF_SPEECH = frozenset({"tts_mmproj", "tts_voices", "tts_speaker_file", "tts_lang"})

#: The search engines that have a name, and the variables of the environment with their keys.
WEB_SEARCH_KEYS = {"brave": "BRAVE_API_KEY", "tavily": "TAVILY_API_KEY"}

#: The types of speculative decoding that there are, and those of llama-server that there are not.
HEADS = ("draft-mtp", "draft-dspark", "draft-dflash", "draft-eagle3")
DRAFT_TYPES = ("none", "auto", "ngram-simple", "ngram-mod", "draft-simple", *HEADS)
_MISSING_DRAFT_TYPES = {
    "ngram-map-k": "ngram-simple has a map of the text, too",
    "ngram-map-k4v": "ngram-simple has a map of the text, too",
    "ngram-cache": "n-grams are learned from requests, not from files",
}

#: Settings of a draft model that MTP heads have, too.
_OF_HEADS = frozenset({
    "spec_draft_n_max", "spec_draft_n_min", "spec_draft_p_min", "spec_draft_type_k",
    "spec_draft_type_v",
})  # fmt: skip


# -- one field

Check = Callable[[Any, str], object]


def _must(hold: Callable[[Any], object], message: str) -> Check:
    """Make a check that raises `message` unless a value passes."""

    def check(value: Any, name: str) -> None:
        if not hold(value):
            raise ConfigError(message.format(name=name, value=value))

    return check


def _may_be_directory(path: str) -> bool:
    expanded = Path(os.path.expanduser(path)).absolute()  # it does not raise
    there = next(one for one in (expanded, *expanded.parents) if os.path.lexists(one))
    return os.path.isdir(there)


def json_schema(text: str, name: str) -> None:
    """Check for JSON; an empty text has no effect."""
    if text:
        parse_json(text, name)


def json_object(text: str, name: str) -> None:
    """Check for a JSON object; an empty text has no effect."""
    if text and not isinstance(parse_json(text, name), dict):
        raise ConfigError(f"{name} must be a JSON object, not {text!r}")


def draft_type(value: str, name: str) -> None:
    """Check the name of a type of speculative decoding."""
    if value in _MISSING_DRAFT_TYPES:
        raise ConfigError(f"{name} {value!r} is one of llama-server that trioserve does not "
                          f"have: {_MISSING_DRAFT_TYPES[value]}")  # fmt: skip
    if value not in DRAFT_TYPES:
        raise ConfigError(f"{name} must be of {', '.join(DRAFT_TYPES)}, not {value!r}")


def whisper_model(value: str, name: str) -> None:
    """Check for a directory of a model that faster-whisper reads, or the name of one."""
    if not value or (value[0] in "./~" and not (Path(value) / "model.bin").is_file()):
        raise ConfigError(
            f"{name} is {value!r}, which is not a directory with a model that faster-whisper reads"
        )
    if not has_extra("whisper"):
        raise ConfigError(f"{name} needs faster-whisper: install trioserve[whisper]")


alias = _must(read_names, "{name} must be a name, or several separated by commas, not {value!r}")
hosts = _must(
    lambda text: all(host.strip() for host in text.split(",")),
    "{name} must be a name, an IP address or a path that ends in .sock, or several separated by "
    "commas, not {value!r}",
)
api_key = _must(
    lambda key: isinstance(key, str) and key.strip(),
    "{name} holds a key that is empty or not text",
)
directory = _must(os.path.isdir, "{name} is {value!r}, which is not a directory")
new_directory = _must(_may_be_directory, "{name} is {value!r}, which is not a directory")
one_directory = _must(os.path.isdir, "{name} has {value!r}, which is not a directory")
match = _must(
    lambda way: way in ("exact", "case", "part"),
    "{name} must be some of exact, case and part, not {value!r}",
)
tool = _must(
    lambda name: name in (ALL_TOOLS, *BUILTIN_TOOLS),
    f"{{name}} has {{value!r}}, which is none of {', '.join(BUILTIN_TOOLS)} and {ALL_TOOLS}",
)
web_search = _must(
    lambda where: where in WEB_SEARCH_KEYS or re.fullmatch(r"https?://[^\s/?#@]+[^\s?#]*", where),
    "{name} must be the address of a SearXNG, as http://HOST:PORT, or one of "
    f"{', '.join(WEB_SEARCH_KEYS)}, not {{value!r}}",
)
prefix = _must(
    lambda path: not path or (path[0] == "/" and path[-1] != "/"),
    "{name} is {value!r}, but must begin with / and not end with it",
)
route = _must(
    lambda path: not path or re.fullmatch(r"(/[\w.~:-]+)+", path),
    "{name} must be a path such as /predict, not {value!r}",
)
header = _must(
    lambda text: text.isascii() and text.isprintable(),
    "{name} is {value!r}, which cannot be the value of a header",
)
ping_interval = _must(
    lambda seconds: not 0 < seconds < 0.1,
    "{name} must be at least 0.1, or 0 or -1 for no pings, not {value}",
)
idle_seconds = _must(
    lambda seconds: seconds == -1 or seconds > 0,
    "{name} must be more than 0, or -1 for never, not {value}",
)


def check_each(config: Config) -> None:
    """Run the checks of single fields; of a tuple, each value is checked."""
    for field in attrs.fields(type(config)):
        if (check := field.metadata.get("check")) is None:
            continue
        value = getattr(config, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None:
                check(each, field.name)


def without_drafts(config: Config) -> Config:
    """Give the same configuration without speculative decoding."""
    fields = (one for one in attrs.fields(type(config)) if one.name.startswith("spec_draft"))
    defaults: dict[str, Any] = {one.name: one.default for one in fields}
    return attrs.evolve(config, spec_type=("none",), **defaults)


def without_speech(config: Config) -> Config:
    """Give the same configuration without a model that speaks."""
    others: dict[str, Any] = dict.fromkeys(OF_SPEECH)
    return attrs.evolve(config, tts=NO_SPEECH, **others)


# -- several fields


def check_together(config: Config) -> None:
    """Reject fields that contradict each other, or have no effect."""
    for is_wrong, message in _conflicts(config):
        if is_wrong:
            raise ConfigError(message)


def _conflicts(config: Config) -> Iterator[tuple[object, str]]:
    """Every possible conflict: whether it exists, and its message."""
    yield (
        config.cache_disk is not None and not config.cache_ram,
        "cache_disk needs RAM, which cache_ram limits: texts get there before they are written, "
        "and after they are read",
    )
    names_file = (config.model or config.model_url) is not None
    yield (
        config.hf_repo is not None and names_file,
        "hf_repo names a model, so no other flag may name one",
    )
    yield (
        config.hf_file is not None and config.hf_repo is None,
        "hf_file has no effect without hf_repo",
    )
    yield (
        not config.fit_target or min(config.fit_target) < 0,
        f"fit_target must be MiB for each GPU, separated by commas, not {config.fit_target!r}",
    )
    yield len(set(config.rpc)) < len(config.rpc), "rpc names a machine twice"
    layers = config.control_vector_layer_range
    yield (
        layers and not (len(layers) == 2 and 1 <= layers[0] <= layers[1] <= 10_000),
        "control_vector_layer_range must be the first and the last layer, counted from 1",
    )
    yield (config.grammar and config.json_schema, "grammar and json_schema cannot be used together")
    yield from _conflicts_with_embeddings(config)
    yield from _conflicts_of_drafts(config)
    # The bundled model may speak.
    may_be_bundled = config.model_named is None and not config.serves_embeddings
    is_mute = config.tts == NO_SPEECH or (config.tts is None and not may_be_bundled)
    for field in sorted(OF_SPEECH):
        has_no_effect = is_mute or (field == "tts_mmproj" and config.tts is None)
        yield (
            has_no_effect and getattr(config, field) is not None,
            f"tts has to be a model for {field} to have an effect",
        )
    yield (
        0 < config.image_max_tokens < config.image_min_tokens,
        f"image_min_tokens must be at most image_max_tokens, which is {config.image_max_tokens}",
    )
    yield (
        config.builtin_tools and sys.platform == "win32",
        "tools: the built-in tools do not run on Windows",
    )
    for is_used, extra, what in (
        (config.builtin_tools, "tools", "tools: the built-in tools need google-re2 and pathspec"),
        (config.mmproj, "media", "mmproj needs av and pillow"),
        (config.tts not in (None, NO_SPEECH), "speech", "tts needs sentencex and av"),
        (config.has_mcp_servers, "mcp", "MCP servers need the package mcp"),
        (config.web_fetch, "web", "web_fetch needs trafilatura"),
        (config.otel, "otel", "otel needs OpenTelemetry"),
    ):
        yield is_used and not has_extra(extra), f"{what}: install trioserve[{extra}]"
    priorities, n_keys = config.api_key_priority, len(config.api_keys)
    yield (
        len(priorities) > n_keys
        or not all(isinstance(one, int) and 0 <= one <= 100 for one in priorities),
        f"api_key_priority must be integers between 0 and 100, at most one for each of {n_keys} "
        f"API keys, not {priorities!r}",
    )
    yield (
        (config.ssl_key_file is None) != (config.ssl_cert_file is None),
        "ssl_key_file and ssl_cert_file must be given together",
    )
    yield config.otel_content and not config.otel, "otel_content needs otel"


def _conflicts_with_embeddings(config: Config) -> Iterator[tuple[object, str]]:
    generates = not config.serves_embeddings
    for field, value in (
        ("lora", config.lora),
        ("lora_dir", config.lora_dir),
        ("control_vector", config.control_vector),
        ("spec_draft_model", config.has_draft_model),
        ("spec_type", "auto" not in config.spec_type and config.draft_types),
        ("backend_sampling", config.backend_sampling),
        ("tts", config.tts not in (None, NO_SPEECH)),
    ):
        yield value and not generates, f"{field} has no effect on embeddings and reranking"
    yield (
        config.pooling == "rank" and generates,
        "pooling 'rank' has no effect without reranking",
    )
    yield (
        config.pooling != "auto" and generates and not config.embd_ctx_size,
        "pooling has no effect without embeddings or reranking",
    )
    yield (
        config.reranking and config.pooling not in ("auto", "rank"),
        f"reranking needs pooling 'rank', not {config.pooling!r}",
    )
    yield (
        config.reranking and (config.mmproj or config.mmproj_url) is not None,
        "mmproj has no effect on reranking: documents are text",
    )


def _conflicts_of_drafts(config: Config) -> Iterator[tuple[object, str]]:
    for lowest, highest in (
        ("spec_ngram_mod_n_min", "spec_ngram_mod_n_max"),
        ("spec_draft_n_min", "spec_draft_n_max"),
    ):
        limit = getattr(config, highest)
        yield (
            getattr(config, lowest) > limit,
            f"{lowest} must be at most {highest}, which is {limit}",
        )
    yield (
        config.spec_draft_model is not None and config.spec_draft_hf is not None,
        "spec_draft_hf names a draft model, so spec_draft_model may not name one",
    )
    heads = [name for name in config.spec_type if name in HEADS]
    yield (
        len(heads) > 1 or (heads and "draft-simple" in config.spec_type),
        f"spec_type may have one of draft-simple, {', '.join(HEADS)}, not {', '.join(heads)}",
    )
    yield (
        "auto" in config.spec_type and (heads or "draft-simple" in config.spec_type),
        "spec_type 'auto' chooses a head, so only types of n-grams may be beside it",
    )
    may_be_found = "auto" in config.spec_type or heads not in ([], ["draft-mtp"])
    if config.has_draft_model or may_be_found:  # a head may be beside the model
        return
    yield "draft-simple" in config.spec_type, "spec_type 'draft-simple' needs spec_draft_model"
    for field in attrs.fields(type(config)):
        if field.name in _OF_HEADS and heads:
            continue
        if field.name.startswith("spec_draft") and getattr(config, field.name) != field.default:
            yield True, f"{field.name} has no effect without spec_draft_model"
