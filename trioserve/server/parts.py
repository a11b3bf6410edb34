"""`Parts`: what a `Server` is made of while its model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import attrs
import trio

from trioserve.config import Config
from trioserve.engine import EmbeddingEngine, Engine
from trioserve.engine.loop import Loop
from trioserve.errors import NotSupportedError
from trioserve.server.adapters import AdapterScales
from trioserve.server.admission import Admission
from trioserve.server.chats import ChatPrompts, Chats
from trioserve.server.completions import Completions
from trioserve.server.dispatch import Dispatcher
from trioserve.server.embedder import Embedder
from trioserve.server.health import Health
from trioserve.server.infill import InfillPrompts
from trioserve.server.model import LoadedModel
from trioserve.server.observers.observer import Observer
from trioserve.server.queue import Queue
from trioserve.server.requests import Requests
from trioserve.server.slot_store import SlotFiles
from trioserve.server.tokens import Tokenizer


@attrs.frozen(kw_only=True)
class Generation:
    """What a server has that makes text."""

    engine: Engine
    completions: Completions
    chats: Chats
    slot_files: SlotFiles


@attrs.frozen(kw_only=True)
class Parts:
    """All parts, made at once. A server makes either text or embeddings."""

    model: LoadedModel
    loop: Loop
    dispatcher: Dispatcher
    admission: Admission
    health: Health
    queue: Queue
    requests: Requests
    tokenizer: Tokenizer
    adapters: AdapterScales
    prompts: ChatPrompts
    infill: InfillPrompts
    _generation: Generation | None
    _embedder: Embedder | None

    @classmethod
    def join(
        cls,
        config: Config,
        model: LoadedModel,
        loop: Loop,
        dispatcher: Dispatcher,
        observers: Sequence[Observer],
    ) -> Self:
        """Make the parts for an engine."""
        admission = Admission(config, dispatcher, model.n_slots)
        health = Health(loop, dispatcher, admission)
        requests = Requests(
            config, loop, dispatcher, admission, model=model.info.name, observers=observers
        )
        tokenizer = Tokenizer(model.vocab, admission)
        adapters = AdapterScales(loop.adapters)
        prompts = ChatPrompts(model, tokenizer)
        generation = embedder = None
        if isinstance(loop, Engine):
            completions = Completions(loop, requests, tokenizer, adapters)
            generation = Generation(
                engine=loop,
                completions=completions,
                chats=Chats(config, model, tokenizer, prompts, completions),
                slot_files=SlotFiles(loop, dispatcher, adapters, config.slot_save_path),
            )
        elif isinstance(loop, EmbeddingEngine):
            embedder = Embedder(config, loop, requests, tokenizer)
        return cls(
            model=model,
            loop=loop,
            dispatcher=dispatcher,
            admission=admission,
            health=health,
            queue=Queue(health.status),
            requests=requests,
            tokenizer=tokenizer,
            adapters=adapters,
            prompts=prompts,
            infill=InfillPrompts(config, model, tokenizer),
            generation=generation,
            embedder=embedder,
        )

    def generation(self) -> Generation:
        """The parts that make text. Raises NotSupportedError where there are none."""
        if self._generation is None:
            raise NotSupportedError(
                "This server makes vectors of texts, and no text. "
                "Start it without `--embeddings` and `--reranking`"
            )
        return self._generation

    def embedder(self) -> Embedder:
        """What makes embeddings. Raises NotSupportedError where nothing does."""
        if self._embedder is None:
            raise NotSupportedError(
                "This server does not support embeddings. Start it with `--embeddings`"
            )
        if self._embedder.pooling == "rank":
            raise NotSupportedError("This server ranks documents, and has no vectors for them.")
        return self._embedder

    def ranker(self) -> Embedder:
        """What ranks documents. Raises NotSupportedError where nothing does."""
        if self._embedder is None or self._embedder.pooling != "rank":
            raise NotSupportedError(
                "This server does not support reranking. Start it with `--reranking`"
            )
        return self._embedder

    async def close(self) -> None:
        """End what runs, and wait until no thread uses the vocabulary any more."""
        self.admission.closed = True
        self.requests.end_all("The server was closed.")
        with trio.CancelScope(shield=True):
            await self.tokenizer.wait_idle()
            if self._generation is not None:
                await self._generation.completions.wait_idle()
