"""``trioserve pull``, ``list`` and ``rm``: the models in the cache."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

from trioserve.cli.options import Arguments, hush
from trioserve.cli.output import Column, note, print_list
from trioserve.cli.progress import DownloadReport
from trioserve.cli.signals import run_until_signal
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.models import TOY, hub_reference
from trioserve.models.fetch import is_address
from trioserve.models.head_families import FILE_WORDS
from trioserve.units import bytes_text


def pull(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    ways = [["--hf-repo", name] for name in given.words] or [[]]
    configs = [parse([*given.flags, *way], given.environ).config for way in ways]
    hush(configs[0], "warning")
    for config in configs:
        if config.offline:
            raise ConfigError("pull is there to download, so --offline cannot be used with it")
        if config.hf_repo is config.model_url is config.tts is None:
            raise ConfigError("name a model, such as trioserve pull ggml-org/gemma-3-4b-it-GGUF")

    async def work() -> None:
        for config in configs:
            await _pull(config)

    code = run_until_signal(work)
    if code:
        note("interrupted; the next pull continues from here")
    return code


async def _pull(config: Config) -> None:
    from trioserve.models import hub

    with DownloadReport(sys.stderr) as report:
        path = None if config.model is None else Path(config.model)
        addresses = [(config.model_url, path), (config.tts, None), (config.tts_mmproj, None)]
        for url, place in addresses:
            if url is None or not is_address(url):
                continue
            pulled = await hub.pull_url(url, place, token=config.hf_token, on_progress=report)
            report.end()
            print(pulled)
        speaks = config.tts if config.tts and hub_reference(config.tts) else None
        named = [(config.hf_repo, config.hf_file), (config.spec_draft_hf, None), (speaks, None)]
        for name, file in named:
            if name is None:
                continue
            is_main, heads = name == config.hf_repo, config.head_types
            model = await hub.pull(
                hub.HubReference.parse(name, file=file, heads=() if is_main else heads),
                token=config.hf_token,
                with_projector=name == speaks or (config.mmproj_auto and is_main),
                heads=(heads or FILE_WORDS) if is_main else (),
                on_progress=report,
            )
            report.end()
            print(f"{model.name}: {bytes_text(model.size)} in {model.files[0]}")
            if model.mmproj is not None:
                print(f"with its projector, {model.mmproj.name}")
            if model.head is not None:
                print(f"with its head for drafts, {model.head.name}")


_COLUMNS = (
    Column("name"),
    Column("size", bytes_text, right=True, missing="unknown"),
    Column("modified"),
    Column("source"),
)


def list_models(given: Arguments) -> int:
    """List what a server with these flags would offer.

    Raises:
        ConfigError: a flag is invalid, or the models cannot be listed.
    """
    from trioserve.models.catalog import Catalog, Source

    catalog = Catalog(given.parsed().config, given.flags, given.environ)
    rows = []
    for one in catalog.entries.values():
        if not one.hidden:
            modified = one.version and datetime.fromtimestamp(one.version[0] / 1e9)
            rows.append({
                "name": one.name,
                "size": one.size or None,
                "modified": f"{modified:%Y-%m-%d %H:%M}" if modified else None,
                "source": TOY if one.source is Source.BUNDLED else one.source.value,
                "path": one.path,
                "aliases": one.aliases,
            })  # fmt: skip
    print_list(_COLUMNS, rows, as_json=given["json"])
    return 0


def rm(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    from trioserve.models.hub import HubReference, remove

    for name in given.words:
        removed = remove(HubReference.parse(name))
        print(f"deleted {removed.name}: {bytes_text(removed.size)}")
    return 0
