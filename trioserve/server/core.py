"""`Core`: the life of a loaded model and its engine, and of the requests to it.

This is the one place where the parts are joined: the model and its engine on the inference
thread, the bridge, and the requests on the Trio event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar

import attrs
import trio
from trio_util import AsyncValue

from trioserve import llama
from trioserve.chat.grammar.thinking import preserved_tokens
from trioserve.chat.template.builtin import source_of
from trioserve.chat.template.render import CHATML, ChatTemplate
from trioserve.config import Config
from trioserve.engine import (
    MAX_IDLE,
    EmbeddingBackend,
    EmbeddingEngine,
    Engine,
    load_strategy,
)
from trioserve.engine.backend import Vocab
from trioserve.engine.loop import Loop
from trioserve.errors import (
    ModelLoadError,
    NotSupportedError,
    ServerClosingError,
    TemplateError,
    UnavailableError,
)
from trioserve.server.adapters import AdapterScales
from trioserve.server.admission import Admission
from trioserve.server.bridge import open_bridge
from trioserve.server.concurrency import alongside
from trioserve.server.dispatch import Dispatcher
from trioserve.server.lifecycle import Driver, Loader, in_thread, load_backend
from trioserve.server.observers.log import RequestLog
from trioserve.server.observers.metrics import Metrics
from trioserve.server.observers.observer import Observer, RequestInfo, observed
from trioserve.server.slot_store import SlotFiles
from trioserve.server.stream import Stream
from trioserve.types import (
    CancelReason,
    EmbeddingTask,
    EngineStatus,
    GenerationParams,
    Grammar,
    ModelInfo,
    Task,
    TokenId,
)

_T = TypeVar("_T")

#: Work on text up to this length (characters) is done on the event loop: it takes about 1 ms.
SHORT_TEXT = 4096

#: Seconds in which an engine that does nothing answers, on a busy machine too.
_ANSWER_TIMEOUT = 5.0


class Core:
    """A model, its engine and its thread, and requests that begin and end.

    `Server` tells what there is to know; the classes between say what requests do.
    """

    info: ModelInfo
    vocab: Vocab
    template: ChatTemplate
    n_ctx_seq: int
    n_slots: int

    def __init__(
        self,
        config: Config | None = None,
        *,
        load: Loader = llama.load,
        drive: Driver = in_thread,
    ) -> None:
        self.config = config or Config()
        self.load_progress = 0.0
        self.ready = False
        self.draining = False
        self._load = load
        self._drive = drive
        #: Counts what the requests do; none unless the configuration says so.
        self.metrics = Metrics() if self.config.metrics_endpoint else None
        #: Who is told when a request starts and ends.
        self.observers: list[Observer] = [RequestLog()]
        if self.metrics is not None:
            self.observers.append(self.metrics)
        self._ids = itertools.count(1)
        self._n_open = AsyncValue(0)
        self._worker = trio.CapacityLimiter(1)
        self._compiler = trio.CapacityLimiter(1)
        self._slot_files: SlotFiles | None = None
        self._life: AbstractAsyncContextManager[None] | None = None

    async def __aenter__(self) -> Self:
        if self._life is not None:
            raise RuntimeError("a Server can be entered only once")
        self._life = self._live()
        await self._life.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._life is not None
        return await self._life.__aexit__(exc_type, exc, traceback)

    # -- life

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        strategy = load_strategy(self.config.strategy, self.config.max_tick_ms)
        bridge = open_bridge()
        try:
            backend = await load_backend(self._load, self.config, self._note_progress)
            self._loop: Loop = (
                EmbeddingEngine(backend, bridge.notify)
                if isinstance(backend, EmbeddingBackend)
                else Engine(
                    backend,
                    strategy,
                    bridge.notify,
                    cache_ram=self.config.cache_ram * 2**20,
                    max_idle=MAX_IDLE if self.config.cache_idle_slots else None,
                    context_shift=self.config.context_shift,
                    flush_interval=self.config.stream_interval_ms / 1e3,
                )
            )
            self.dispatcher = Dispatcher(
                self._loop,
                bridge,
                unread_tokens=self.config.unread_tokens,
                stall_timeout=self.config.stall_timeout,
            )
            async with self._drive(self._loop):
                await trio.to_thread.run_sync(self._introduce)
                async with self._serve():
                    yield
        finally:
            bridge.close()

    def _note_progress(self, share: float) -> None:
        self.load_progress = share

    def _introduce(self) -> None:
        """Get to know the model. In a thread: a template takes a while to compile and probe."""
        engine = self._loop
        self.info, self.vocab = engine.info, engine.vocab
        self.n_ctx_seq, self.n_slots = engine.n_ctx_seq, engine.n_slots
        #: The LoRA adapters, and which of them requests get that name none.
        self.lora = AdapterScales(engine.adapters)
        try:
            self.template = ChatTemplate(
                source_of(self.config.chat_template or self.info.chat_template or CHATML),
                bos_token=self.info.bos_token,
                eos_token=self.info.eos_token,
            )
            self._template_variables = self.config.template_variables
            if self.config.reasoning == "auto" and self.template.capabilities.thinking_variable:
                self._template_variables.setdefault("enable_thinking", True)
            self._preserved_tokens = preserved_tokens(
                self.template.format, self.vocab.pieces, self.vocab.names
            )
        except TemplateError as error:
            raise ModelLoadError(f"The chat template cannot be used: {error.message}") from error
        self._admission = Admission(self.config, self.dispatcher, self.n_slots)
        weights = self.config.api_key_weights
        self._weights = dict(zip(self.config.api_keys, weights, strict=False))
        self._defaults = GenerationParams(
            sampling=self.config.sampling,
            max_tokens=self.config.n_predict,
            n_keep=self.config.n_keep,
            stop=self.config.stop,
            cache_prompt=self.config.cache_prompt,
            grammar=_default_grammar(self.config),
        )

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        async with alongside(self.dispatcher.run):
            self.ready = True
            try:
                yield
            finally:
                self.ready = False
                self._end_all("The server was closed.")
                with trio.CancelScope(shield=True):
                    async with self._worker, self._compiler:
                        pass  # no thread is in the vocabulary any more

    def _end_all(self, message: str) -> None:
        for mailbox in self.dispatcher.mailboxes:
            self.dispatcher.end(mailbox, ServerClosingError(message), CancelReason.SHUTDOWN)

    @property
    def _engine(self) -> Engine:
        """The engine that makes text. Raises NotSupportedError where there is none."""
        if not isinstance(self._loop, Engine):
            raise NotSupportedError(
                "This server makes vectors of texts, and no text. "
                "Start it without `--embeddings` and `--reranking`"
            )
        return self._loop

    @property
    def slot_files(self) -> SlotFiles:
        """Saves what slots have computed. Raises NotSupportedError where no text is made."""
        if self._slot_files is None:
            directory = self.config.slot_save_path
            self._slot_files = SlotFiles(self._engine, self.dispatcher, self.lora, directory)
        return self._slot_files

    def check_generates(self) -> None:
        """Refuse work that makes text where the server makes vectors.

        Raises:
            NotSupportedError: it was started with `embeddings` or `reranking`.
        """
        self._engine  # noqa: B018 (raises)

    def _check_open(self) -> None:
        if self.draining or not self.ready:
            raise ServerClosingError

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and let the running ones finish, for `timeout` seconds at most.

        Those that run on are ended: their readers get a `ServerClosingError`. When cancelled, the
        server stays closed for new requests and nothing is ended.
        """
        self.draining = True
        with trio.move_on_after(timeout) as scope:
            await self._n_open.wait_value(0)
        if scope.cancelled_caught:
            self._end_all(f"The server shut down, {timeout:g} seconds after it was told to.")

    # -- text

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[TokenId, ...]:
        """Turn text into token ids; see `Vocab.tokenize`. Long text goes to a worker thread.

        Raises:
            InvalidRequestError: the text cannot be encoded.
        """
        self._check_open()
        work = partial(
            self.vocab.tokenize, text, add_special=add_special, parse_special=parse_special
        )
        return await self._work(work, len(text))

    def detokenize(self, tokens: Sequence[TokenId]) -> str:
        """Turn token ids into text. Bytes that are no character become U+FFFD.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        if not self.ready:  # while draining too: running requests write their last event with it
            raise ServerClosingError
        return self.vocab.detokenize(tokens).decode("utf-8", "replace")

    async def _work(self, work: Callable[[], _T], n_chars: int) -> _T:
        """Do short work here and long work in a thread; either way a checkpoint."""
        if n_chars <= SHORT_TEXT:
            await trio.lowlevel.checkpoint()
            self._check_open()
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._worker)

    # -- requests

    @contextmanager
    def _request(
        self, task: Task | EmbeddingTask, on_cancel: CancelReason, deadline: float
    ) -> Iterator[Stream]:
        """Open a request and close it. All of it is synchronous: no await, no gap."""
        self._check_open()
        self._loop.check(task)
        self._admission.check(len(task.prompt))
        mailbox = self.dispatcher.open(task.id, len(task.prompt), deadline)
        stream = Stream(task.prompt.tokens, mailbox, self.dispatcher)
        self._n_open.value += 1
        try:
            info = RequestInfo(task.id, self.info.name, len(task.prompt))
            with observed(self.observers, info, stream, on_cancel):
                self._loop.submit(task)
                yield stream
        finally:
            self.dispatcher.close(mailbox)
            self._n_open.value -= 1
            if stream.finished is not None:
                timings = stream.finished.timings
                self._admission.observe(timings.prompt_ms + timings.predicted_ms)

    # -- a look at it

    async def status(self) -> EngineStatus:
        """Look at the slots and the queue, between two ticks. May be cancelled.

        Raises:
            ServerClosingError: the server is closed.
        """
        if not self.ready:
            raise ServerClosingError
        status = await self.dispatcher.call(self._loop.status)
        wait_s = self._admission.wait_s
        waiting = (attrs.evolve(one, wait_s=wait_s(one.position)) for one in status.waiting)
        return attrs.evolve(status, waiting=tuple(waiting))

    def check_queue(self) -> None:
        """Look whether there is room for one more request, without holding it.

        Raises:
            QueueFullError: too many requests wait already.
            ServerClosingError: the server drains, or is closed.
        """
        self._check_open()
        self._admission.check(0)

    async def check_live(self, tick_timeout: float) -> None:
        """Look whether the engine works: it ticks, or it has nothing to do and answers.

        Args:
            tick_timeout: seconds that one tick may take.

        Raises:
            UnavailableError: it does not.
            ServerClosingError: the server is closed.
        """
        if self._loop.failure is not None:
            raise UnavailableError(self._loop.failure.message)
        if monotonic() - self._loop.heartbeat < tick_timeout:
            return
        # The last tick began long ago. It still runs, or was followed by a rest.
        with trio.move_on_after(_ANSWER_TIMEOUT) as scope:
            await self.status()
        if scope.cancelled_caught:
            raise UnavailableError(f"The engine has not ticked for {tick_timeout:g} seconds.")


def _default_grammar(config: Config) -> Grammar | None:
    """The grammar of requests that have none of their own."""
    if config.json_schema:
        return Grammar("json_schema", config.json_schema, param="json_schema")
    return Grammar("gbnf", config.grammar) if config.grammar else None
