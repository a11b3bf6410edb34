"""`Models`: what an app serves, one model or many. Handlers ask it for all that is about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.api.base.caller import Caller
from trioserve.api.base.generation import Responses
from trioserve.api.base.reply import Reply
from trioserve.chat.template.render import ChatTemplate
from trioserve.chat.uploads import Upload
from trioserve.concurrency import Feed
from trioserve.config import Config
from trioserve.server.model_server import ModelServer
from trioserve.types import GenerationParams, Modalities

if TYPE_CHECKING:
    from trioserve.router.prospects import Prospects
    from trioserve.router.states import FleetEvent


@attrs.frozen(kw_only=True)
class Card:
    """A model as its file has it. What is not known is empty, or 0."""

    name: str
    size: int  # bytes
    modified: float  # seconds since the epoch
    architecture: str = ""
    n_params: int = 0
    quantization: str = ""  # as llama.cpp writes it, such as "Q4_K - Medium"


@attrs.frozen(kw_only=True)
class Loaded:
    """A model that is in memory, and until when: seconds since the epoch; None: for good."""

    card: Card
    n_ctx: int
    expires: float | None = None


@attrs.frozen(kw_only=True)
class Details:
    """All that a file and its flags say of a model.

    Attributes:
        card: in short.
        path: of the first file.
        template: the chat template, in Jinja.
        metadata: of the GGUF file.
        defaults: of requests.
        n_ctx: of a request, tokens; 0: not known.
        abilities: such as "completion" and "tools", in the words of Ollama.
    """

    card: Card
    path: str
    template: str
    metadata: Mapping[str, Any]
    defaults: GenerationParams
    n_ctx: int
    abilities: Sequence[str]


def abilities(template: ChatTemplate, *, fills_gaps: bool, modalities: Modalities) -> list[str]:
    """Say what a model that makes text can do."""
    can = {
        "completion": True,
        "tools": template.capabilities.supports_tools,
        "thinking": can_think(template),
        "insert": fills_gaps,
        "vision": modalities.vision,
        "audio": modalities.audio,
    }
    return [name for name, is_so in can.items() if is_so]


def can_think(template: ChatTemplate) -> bool:
    """Judge by its template if a model may reason before it answers."""
    return template.format.thinking is not None or template.capabilities.supports_enable_thinking


class Models(ABC):
    """The models of an app.

    Each method that takes a name raises UnknownModelError when no model has it, and
    PermissionDeniedError when the API key of the caller may not use the model. All raise
    ModelLoadingError before there is anything, ServerClosingError while the app stops, and a
    TrioServeError with the reason if the app has no model.

    Attributes:
        config: of the app.
        responses: that are being sent.
    """

    config: Config
    responses: Responses

    @abstractmethod
    async def use(self, name: str | None, caller: Caller) -> ModelServer:
        """Find the server of a model that a request is to use; None: it does not say. It may
        sleep.
        """

    @abstractmethod
    def check_ready(self) -> None:
        """Check that requests are taken. Raises UnavailableError."""

    @abstractmethod
    def check_live(self) -> None:
        """Check that nothing is broken for good. Raises UnavailableError."""

    # -- descriptions

    @abstractmethod
    async def listed(self, caller: Caller, *, reload: bool = False) -> Sequence[Any]:
        """Describe those that a caller may use, as `describe` does.

        With `reload`, those of many models are looked for again first.
        """

    @abstractmethod
    async def describe(self, name: str, caller: Caller) -> Any:
        """Describe one as ``/v1/models`` does: a `Model`, or the object of one."""

    @abstractmethod
    async def cards(self, caller: Caller) -> Sequence[Card]:
        """Describe the files of those that are here and that a caller may use."""

    @abstractmethod
    async def details(self, name: str, caller: Caller) -> Details:
        """Describe one by its file. Raises NotFoundError: the file is missing or broken."""

    @abstractmethod
    async def in_memory(self, caller: Caller) -> Sequence[Loaded]:
        """Describe those that are in memory and that a caller may use."""

    @abstractmethod
    async def properties(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Describe what serves, or the model that a query names."""

    @abstractmethod
    async def metrics(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Write the metrics, or those of the model that a query names, in Prometheus' format.

        Raises NotSupportedError: the app writes no metrics.
        """

    @abstractmethod
    async def snapshot(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Write the same as one JSON object."""

    async def uploads(self, ids: Sequence[str], caller: Caller) -> Mapping[str, Upload]:
        """Read files that a caller has uploaded, by their ids. Those that are not there, are not.

        Raises:
            TrioServeError: they cannot be read, or take more memory than the request may.
        """
        return {}

    # -- commands

    @abstractmethod
    async def load(self, name: str, caller: Caller, *, args: tuple[str, ...] = ()) -> None:
        """Have a model loaded; `args` are flags beside those that it has."""

    @abstractmethod
    async def unload(self, name: str, caller: Caller) -> None:
        """Free the memory of a model, or cancel its download."""

    @abstractmethod
    async def download(self, name: str, caller: Caller, *, again: bool = False) -> str:
        """Begin to download a model from the hub; returns its name. See `Downloads.start`."""

    @property
    @abstractmethod
    def prospects(self) -> Prospects:
        """Models that could be downloaded. Raises NotSupportedError where none can."""

    @abstractmethod
    async def remove(self, name: str, caller: Caller) -> None:
        """Delete a model that was downloaded."""

    @abstractmethod
    def news(self) -> AbstractContextManager[Feed[FleetEvent]]:
        """Follow what happens to the models, for a block."""
