"""`fetch`: downloads the models that a configuration names, so that it names files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import attrs
import trio

from trioserve.config import Config
from trioserve.errors import HubError, ModelLoadError
from trioserve.models import hub_reference

if TYPE_CHECKING:
    from trioserve.models.hub import DownloadProgress, HubModel, HubReference


def is_local(config: Config) -> bool:
    """Return True if the files of the models are named, and none has to be looked for."""
    named = (config.model, config.spec_draft_model, config.tts)
    return (
        config.hf_repo is config.model_url is config.spec_draft_hf is config.mmproj_url is None
        and not any(text is not None and hub_reference(text) for text in named)
        and not any(map(is_address, filter(None, (config.tts, config.tts_mmproj))))
    )  # fmt: skip


def is_address(text: str) -> bool:
    """Return True if the name of a model is the address of a file."""
    return hub_reference(text) is None and text.startswith(("http://", "https://"))


async def fetch(
    config: Config, on_progress: Callable[[DownloadProgress], None] = lambda progress: None
) -> Config:
    """Find the models that a configuration names, and download those that are not there.

    A hub model that is in the cache is used as it is, even if the hub has a newer one. A model at
    an address is checked each time, and downloaded again when it has changed.

    Args:
        config: what to serve.
        on_progress: called with the progress of a download, several times a second.

    Returns:
        the configuration with paths in the place of names. A hub model without an alias gets its
        hub name as its alias.

    Raises:
        HubError: a model cannot be downloaded.
        ModelLoadError: it needs a download, which the configuration forbids.
    """
    if is_local(config):
        return config
    files = _Files(config, on_progress)
    if config.model_url is not None:
        path = await files.at(config.model_url, config.model)
        config = attrs.evolve(config, model=path, model_url=None)
    else:
        uses_projector = (
            config.mmproj_auto
            and config.mmproj is config.mmproj_url is None
            and not config.reranking
        )
        found = await files.of(
            config.model,
            config.hf_repo,
            config.hf_file,
            with_projector=uses_projector,
            heads=() if config.has_draft_model else config.head_types,
        )
        if found is not None:
            path, alias = str(found.files[0]), config.alias or found.name
            config = attrs.evolve(config, model=path, alias=alias, hf_repo=None, hf_file=None)
            if uses_projector and found.mmproj is not None:
                config = attrs.evolve(config, mmproj=str(found.mmproj))
    if config.mmproj_url is not None:
        path = await files.at(config.mmproj_url, config.mmproj)
        config = attrs.evolve(config, mmproj=path, mmproj_url=None)
    config = await _with_speech(config, files)
    draft = await files.of(config.spec_draft_model, config.spec_draft_hf, wanted=config.head_types)
    if draft is None:
        return config
    return attrs.evolve(config, spec_draft_model=str(draft.files[0]), spec_draft_hf=None)


async def _with_speech(config: Config, files: _Files) -> Config:
    """Put paths in the place of the names of the model that speaks and of its projector."""
    model, projector = config.tts, config.tts_mmproj
    found = await files.of(model, None, needs_projector=projector is None)
    if found is not None:
        model = str(found.files[0])
        if projector is None and found.mmproj is not None:
            projector = str(found.mmproj)
    elif model is not None and is_address(model):
        model = await files.at(model, None)
    if projector is not None and is_address(projector):
        projector = await files.at(projector, None)
    return attrs.evolve(config, tts=model, tts_mmproj=projector)


class _Files:
    """Finds files, or downloads them."""

    def __init__(self, config: Config, on_progress: Callable[[DownloadProgress], None]) -> None:
        from trioserve.models.hub import cache

        self._config = config
        self._on_progress = on_progress
        self._offline = config.offline or cache.is_offline()

    async def of(
        self,
        text: str | None,
        on_hub: str | None,
        file: str | None = None,
        *,
        with_projector: bool = False,
        needs_projector: bool = False,
        heads: tuple[str, ...] = (),
        wanted: tuple[str, ...] = (),
    ) -> HubModel | None:
        """Find the model that two fields name; None: they name a file, or nothing.

        A projector that it needs is downloaded, even if the model is in the cache. `heads` are the
        types of drafts that it may have a head for, and `wanted` those of the heads that may be
        found in its place.
        """
        from trioserve.models.hub import HubReference

        if on_hub is not None:
            reference = HubReference.parse(on_hub, file=file, heads=wanted)
            return await self._model(reference, with_projector, needs_projector, heads)
        named = None if text is None else hub_reference(text)
        if named is None:
            return None
        try:
            reference = attrs.evolve(named, heads=wanted)
            return await self._model(reference, with_projector, needs_projector, heads)
        except HubError as error:
            raise ModelLoadError(
                f"There is no file {text}, and no such model can be downloaded: {error.message}"
            ) from error

    async def at(self, url: str, place: str | None) -> str:
        """The path for the file at an address: that place, if there is one."""
        from trioserve.models.hub import place_of, pull_url

        path = None if place is None else Path(place)
        if self._offline:
            path = place_of(url, path)
            if not await trio.Path(path).is_file():
                self._refuse(url)
            return str(path)
        found = await pull_url(
            url, path, token=self._config.hf_token, on_progress=self._on_progress
        )
        return str(found)

    async def _model(
        self,
        reference: HubReference,
        with_projector: bool,
        needs_projector: bool,
        heads: tuple[str, ...],
    ) -> HubModel:
        from trioserve.models import hub

        model = await trio.to_thread.run_sync(hub.find, reference)
        if model is not None and (self._offline or model.mmproj or not needs_projector):
            return model
        if self._offline:
            self._refuse(str(reference))
        return await hub.pull(
            reference,
            token=self._config.hf_token,
            with_projector=with_projector or needs_projector,
            heads=heads,
            on_progress=self._on_progress,
        )

    def _refuse(self, what: str) -> NoReturn:
        raise ModelLoadError(
            f"{what} is not in the cache, and nothing is downloaded (--offline or HF_HUB_OFFLINE)."
        )
