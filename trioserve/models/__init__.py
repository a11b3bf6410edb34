"""Finds the file of a model by its reference, and has the bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trioserve.errors import InvalidRequestError, ModelLoadError

if TYPE_CHECKING:
    from trioserve.config import Config
    from trioserve.models.hub import HubReference

#: A small chat model, for a first run and for tests.
BUNDLED: Path = Path(__file__).with_name("bundled.gguf")

#: Its name in lists of models.
BUNDLED_NAME = "bundled"

#: Its description in lists.
TOY = "comes with trioserve: a toy, to try the server with"

#: Its projector, if there is one.
BUNDLED_PROJECTOR: Path = Path(__file__).with_name("bundled-mmproj.gguf")

#: Prompts that it answers right with any seed, at the default temperature.
EXAMPLE_PROMPTS = (
    "What is the capital of Japan?",
    "Count from 1 to 10",
    "Write a JSON object with name Ada and age 36",
)


def introduction(path: Path | None) -> dict[str, Any]:
    """Say whether the model at a path is the bundled one, as lists of models do."""
    is_toy = path == BUNDLED
    return {"is_toy": is_toy, "example_prompts": list(EXAMPLE_PROMPTS) if is_toy else []}


def resolve(reference: str | None) -> Path:
    """Return the file that `Config.model` refers to.

    It is a path, or a model of the hub that is in the cache; none: the bundled model.

    Raises:
        ModelLoadError: it is a model of the hub that is not in the cache.
    """
    if reference is None:
        return BUNDLED
    on_hub = hub_reference(reference)
    if on_hub is None:
        return Path(reference)
    from trioserve.models.hub import find

    model = find(on_hub)
    if model is None:
        raise ModelLoadError(
            f"{reference} is neither a file nor a model in the cache; for one from the hub, run "
            f"trioserve pull {reference}."
        )
    return model.files[0]


def resolve_projector(config: Config) -> Path | None:
    """Return the file of the projector for images and sound; None: the model takes text only.

    It is the one that is configured, or else the one that came with the model.
    """
    if config.mmproj is not None:
        return Path(config.mmproj)
    if not config.mmproj_auto:
        return None
    if config.model is None:
        return BUNDLED_PROJECTOR if BUNDLED_PROJECTOR.exists() else None
    on_hub = hub_reference(config.model)
    if on_hub is None:
        return None
    from trioserve.models.hub import find

    model = find(on_hub)
    return None if model is None else model.mmproj


def hub_reference(text: str) -> HubReference | None:
    """Read the name of a model on the hub; None if it is the path of a file."""
    if text.endswith(".gguf") or Path(text).exists():
        return None
    from trioserve.models.hub.reference import HubReference

    try:
        return HubReference.parse(text)
    except InvalidRequestError:
        return None
