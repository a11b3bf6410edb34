"""``trioserve pull``, ``list`` and ``rm``: the models in the cache."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from pathlib import Path

import trio

from trioserve.cli.commands import bytes_text, table
from trioserve.cli.progress import DownloadReport
from trioserve.config import Config, logs
from trioserve.config.parse import parse
from trioserve.errors import ConfigError


def pull(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        TrioServeError: a model cannot be downloaded.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    flags = argv[len(names) :]
    if names:
        configs = [parse([*flags, "--hf-repo", name], environ).config for name in names]
    else:
        configs = [parse(flags, environ).config]
    logs.configure(configs[0])
    for config in configs:
        if config.offline:
            raise ConfigError("pull is there to download, so --offline cannot be used with it")
        if config.hf_repo is config.model_url is None:
            raise ConfigError("name a model, such as trioserve pull ggml-org/gemma-3-4b-it-GGUF")
    try:
        for config in configs:
            trio.run(_pull, config)
    except KeyboardInterrupt:
        print("trioserve: interrupted; the next pull continues from here", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


async def _pull(config: Config) -> None:
    from trioserve.models import hub
    from trioserve.models.hub import pull_url

    with DownloadReport(sys.stderr) as report:
        if config.model_url is not None:
            path = None if config.model is None else Path(config.model)
            pulled = await pull_url(
                config.model_url, path, token=config.hf_token, on_progress=report
            )
            report.end()
            print(pulled)
        for name, file in ((config.hf_repo, config.hf_file), (config.spec_draft_hf, None)):
            if name is None:
                continue
            model = await hub.pull(
                hub.HubReference.parse(name, file=file),
                token=config.hf_token,
                with_projector=config.mmproj_auto and name == config.hf_repo,
                on_progress=report,
            )
            report.end()
            print(f"{model.name}: {bytes_text(model.size)} in {model.files[0]}")
            if model.mmproj is not None:
                print(f"with its projector, {model.mmproj.name}")


def list_models(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: there are arguments.
    """
    if argv:
        raise ConfigError(f"list takes no flags and no names, such as {argv[0]!r}")
    print(list_text(), end="")
    return 0


def list_text() -> str:
    """A line for each model: its name, its size, and the time of its download."""
    from trioserve.models import BUNDLED, BUNDLED_NAME, TOY
    from trioserve.models.hub import cached_models

    rows = [("NAME", "SIZE", "DOWNLOADED")]
    for model in cached_models():
        downloaded = datetime.fromtimestamp(model.files[0].stat().st_mtime)
        rows.append((model.name, bytes_text(model.size), f"{downloaded:%Y-%m-%d %H:%M}"))
    rows.append((BUNDLED_NAME, bytes_text(BUNDLED.stat().st_size), TOY))
    return table(rows, right={1})


def rm(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        TrioServeError: a model does not exist, or cannot be deleted.
    """
    from trioserve.models.hub import HubReference, remove

    flags = [word for word in argv if word.startswith("-")]
    if flags or not argv:
        raise ConfigError("rm takes the names of models, as trioserve list has them")
    for name in argv:
        removed = remove(HubReference.parse(name))
        print(f"deleted {removed.name}: {bytes_text(removed.size)}")
    return 0
