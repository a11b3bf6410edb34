"""Descriptions of the models of a router: by their files, and by the reports of their processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.api.base.described import names
from trioserve.api.base.models import Card, Details, abilities
from trioserve.chat.template.builtin import CHATML, CHATML_TOKENS, source_of, template_named
from trioserve.chat.template.render import ChatTemplate
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ModelLoadError, NotFoundError, TemplateError, TrioServeError
from trioserve.models import gguf, introduction, resolve_projector
from trioserve.models.catalog import GgufSummary, ModelEntry, Source, describe, modalities_in
from trioserve.router.states import ModelState, Status
from trioserve.types import GenerationParams, Modalities

#: The sources, in the words of llama-server where it has them.
_SOURCES: Mapping[Source, str] = {
    Source.BUNDLED: "bundled",
    Source.CACHE: "cache",
    Source.DIRECTORY: "models_dir",
    Source.PRESET: "preset",
    Source.UPSTREAM: "upstream",
}


def described(
    entry: ModelEntry, state: ModelState, modalities: Modalities, info: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a model as ``/v1/models`` does.

    Once it has been loaded, `info` is what is known of it. Until then, `modalities` are.
    """
    created = 0 if entry.version is None else entry.version[0] // 10**9
    return {
        "architecture": {
            "input_modalities": modalities.names,
            "output_modalities": ["text", "audio"] if entry.speaks else ["text"],
        },
        **introduction(entry.path),
        **info,
        **names(entry.name, created),
        "aliases": list(entry.aliases),
        "tags": list(entry.tags),
        "status": _status(entry, state),
        "source": _SOURCES[entry.source],
        "can_remove": entry.source is Source.CACHE,
        "path": None if entry.path is None else str(entry.path),
        "size": entry.size,
    }


def download(name: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a model that is not here yet, in the same way."""
    return {
        **names(name),
        "status": {"value": Status.DOWNLOADING.value, "progress": progress},
    }


def _status(entry: ModelEntry, state: ModelState) -> dict[str, Any]:
    """Describe the state of a model. Unknown values are left out."""
    written: dict[str, Any] = {
        "value": state.value.value,
        "args": list(state.args or entry.args),
    }
    more: dict[str, Any] = {
        "progress": state.progress,
        "pid": state.pid,
        "memory": state.memory,
        "memory_used": state.memory_used,
        "memory_gpus": list(state.memory_gpus) or None,
        "last_used": state.last_used,
    }
    if state.failed:
        more |= {
            "failed": True,
            "exit_code": state.exit_code,
            "message": state.message,
            "log": list(state.log_tail),
        }
    return written | {name: value for name, value in more.items() if value is not None}


class Files:
    """The contents of model files. Each is read once, in a thread."""

    def __init__(self) -> None:
        self._summaries: dict[ModelEntry, GgufSummary | None] = {}
        self._modalities: dict[ModelEntry, Modalities] = {}

    async def _summary(self, entry: ModelEntry) -> GgufSummary | None:
        """The summary of a file; None: it is not there, or broken."""
        if entry.path is None:
            return None
        if entry not in self._summaries:
            try:
                self._summaries[entry] = await trio.to_thread.run_sync(describe, entry.path)
            except ModelLoadError:
                self._summaries[entry] = None
        return self._summaries[entry]

    async def modalities(self, entries: Iterable[ModelEntry]) -> Mapping[str, Modalities]:
        """The modalities of models, by their files, which may be missing."""
        entries = list(entries)
        if new := [one for one in entries if one not in self._modalities]:
            found = await trio.to_thread.run_sync(lambda: [_modalities_of(one) for one in new])
            self._modalities.update(zip(new, found, strict=True))
        return {one.name: self._modalities[one] for one in entries}

    async def card(self, entry: ModelEntry) -> Card:
        """Describe a model in short."""
        return _card(entry, await self._summary(entry))

    async def details(self, entry: ModelEntry) -> Details:
        """Describe a model. Raises NotFoundError: its file is missing or broken."""
        summary = await self._summary(entry)
        if summary is None:
            raise NotFoundError(f"The model {entry.name!r} is not here yet, or is broken.")
        return await trio.to_thread.run_sync(_details, entry, summary)


def _card(entry: ModelEntry, summary: GgufSummary | None) -> Card:
    modified = 0.0 if entry.version is None else entry.version[0] / 1e9
    card = Card(name=entry.name, size=entry.size, modified=modified)
    if summary is None:
        return card
    return attrs.evolve(
        card,
        architecture=summary.architecture,
        n_params=summary.n_params,
        quantization=summary.quantization,
    )


def _details(entry: ModelEntry, summary: GgufSummary) -> Details:
    config = parse(entry.args, {}).config
    template = config.chat_template or summary.template or _fallback(summary.path)
    return Details(
        card=_card(entry, summary),
        path=str(summary.path),
        template=template,
        metadata=_metadata(summary.path),
        defaults=GenerationParams(
            sampling=config.sampling, max_tokens=config.n_predict, stop=config.stop
        ),
        n_ctx=config.ctx_size,
        abilities=_abilities(config, template),
    )


def _fallback(path: Path) -> str:
    """Tell the template of a file that has none, by the tokens in it."""
    with gguf.read(path) as header:
        tokens = header.texts("tokenizer.ggml.tokens") or ()
    has_chatml = all(each.encode() in tokens for each in CHATML_TOKENS)
    return CHATML if has_chatml else template_named("plain")


def _metadata(path: Path) -> dict[str, Any]:
    """Read texts and numbers from the header of a file; lists are left out."""
    with gguf.read(path) as header:
        texts = {key: text for key in header if (text := header.text(key))}
        numbers = {key: header.numbers(key) for key in header if not header.count(key)}
    return texts | {key: values[0] for key, values in numbers.items() if values}


def _abilities(config: Config, template: str) -> list[str]:
    if config.serves_embeddings:
        return ["embedding"] if config.embeddings and not config.reranking else []
    try:
        # The tokens for gaps are in the vocabulary, which is not read.
        return abilities(
            ChatTemplate(source_of(template)),
            fills_gaps=False,
            modalities=modalities_in(resolve_projector(config)),
        )
    except TemplateError:
        return ["completion"]


def _modalities_of(entry: ModelEntry) -> Modalities:
    try:
        config = parse(entry.args, {}).config
        return Modalities() if config.reranking else modalities_in(resolve_projector(config))
    except TrioServeError:  # loading it raises the same error
        return Modalities()
