"""``trioserve show``: the contents of a model file, and the memory that it needs here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

import attrs
import trio

from trioserve.cli.named import with_files
from trioserve.cli.options import Arguments, hush
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ModelLoadError, TrioServeError, UnknownModelError
from trioserve.models import BUNDLED, TOY, resolve
from trioserve.models.catalog import GgufSummary, describe
from trioserve.models.fetch import fetch, is_local
from trioserve.units import bytes_text, count_text

_COLUMN = 16

_UNKNOWN = "The header of the file cannot be read, or it is not known how much memory is free."


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    named = () if given.first is None else ("--model", given.first)
    flags = with_files([*given.flags, *named], given.environ)
    config = on_disk(parse(flags, given.environ).config)
    hush(config)
    summary = describe(resolve(config.model))
    if given["template"]:
        print(summary.template, end="")
        _describe_template(summary.template)
        return 0
    if given["fit"]:
        return _show_fit(config, as_json=given["json"])
    try:
        memory, problem = _memory(config), ""
    except TrioServeError as error:
        memory, problem = {}, error.message
    if given["json"]:
        plain = attrs.asdict(summary) | {"path": str(summary.path)}
        print(json.dumps(plain | {"memory": memory or None, "problem": problem or None}))
    else:
        print(_text(summary, memory, problem), end="")
    return 1 if problem else 0


def _describe_template(source: str) -> None:
    """Say on standard error, so that the template stands alone, what was found out about it."""
    from trioserve.chat.template.render import ChatTemplate

    template = ChatTemplate(source)
    found = template.recognized
    lines = [f"format: {found.name}", *(f"{name}: {result}" for name, result in found.findings)]
    lines += [f"repair {repair.name}: {repair.about}" for repair in template.repairs]
    print(*lines, sep="\n", file=sys.stderr)


def _show_fit(config: Config, *, as_json: bool) -> int:
    """Say what a server would choose for the memory that is free now, by the header alone."""
    from trioserve.llama import room
    from trioserve.llama.fit import summary

    try:
        found, problem = room.plan(config), _UNKNOWN
    except TrioServeError as error:
        found, problem = None, error.message
    if found is None:
        print(json.dumps({"problem": problem}) if as_json else problem)
        return 1
    sizes = attrs.asdict(found.need) | {"ram": found.need.ram}
    free = {"ram": found.room.ram, "gpus": found.room.gpus}
    plain = {"need": sizes, "free": free, "changes": found.changes}
    print(json.dumps(plain) if as_json else summary(found))
    return 0


def _memory(config: Config) -> dict[str, int | None]:
    """Estimate the memory that a server of the model needs, and measure the free memory."""
    from trioserve.llama.machine import free_memory
    from trioserve.llama.trial_process import measure

    found = measure(config)
    return {**attrs.asdict(found), "total": found.total, "free": free_memory()}


def _text(summary: GgufSummary, memory: Mapping[str, int | None], problem: str) -> str:
    toy = TOY if summary.path == BUNDLED else ""
    rows = [("note", toy), *_rows(summary), ("memory", problem or _memory_text(memory))]
    lines = (f"  {name.ljust(_COLUMN)}{text}\n" for name, text in rows if text)
    return f"{summary.path}\n{''.join(lines)}"


def _rows(summary: GgufSummary) -> Iterator[tuple[str, str]]:
    yield "name", summary.name
    yield "architecture", summary.architecture
    experts = f", {summary.n_experts_used} of {summary.n_experts} experts"
    yield "parameters", count_text(summary.n_params) + (experts if summary.n_experts else "")
    yield "quantization", summary.quantization
    files = f" in {summary.n_files} files" if summary.n_files > 1 else ""
    yield "size", bytes_text(summary.size) + files
    yield "context", f"{summary.n_ctx_train} tokens"
    yield "layers", f"{summary.n_layer}, {summary.n_embd} wide"
    yield "vocabulary", f"{summary.n_vocab} tokens"
    yield "chat template", f"{len(summary.template)} characters" if summary.template else "none"
    yield "licence", " ".join(filter(None, (summary.licence, summary.licence_link))) or "not named"
    yield "languages", ", ".join(summary.languages)


def _memory_text(memory: Mapping[str, int | None]) -> str:
    parts = {name: bytes_text(size or 0) for name, size in memory.items()}
    text = (
        f"{parts['total']}: {parts['weights']} for the weights, {parts['cache']} for the context "
        f"of {memory['n_ctx']} tokens, {parts['compute']} for computing"
    )
    return text if memory["free"] is None else f"{text}; {parts['free']} are free"


def on_disk(config: Config) -> Config:
    """Replace names of the hub with the paths of cached files; downloads nothing.

    Raises:
        UnknownModelError: a model is not in the cache.
    """
    if is_local(config):
        return config
    try:
        return trio.run(fetch, attrs.evolve(config, offline=True))
    except ModelLoadError as error:
        named = " or ".join(filter(None, (config.model_named, config.spec_draft_hf, config.tts)))
        raise UnknownModelError(
            f"The model {named} is not on this machine yet; trioserve pull downloads it."
        ) from error
