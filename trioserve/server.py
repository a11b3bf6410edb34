"""`Server`: a model that answers requests, as long as an ``async with`` block runs.

This is the one place where the parts are joined: the model and its engine on the inference
thread, the bridge, and the requests on the Trio event loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

import attrs
import trio
from trio_util import AsyncValue

from trioserve import llama
from trioserve.adapters import AdapterScales
from trioserve.admission import Admission
from trioserve.bridge import open_bridge
from trioserve.chat.builtin import source_of
from trioserve.chat.parser import MessageParser
from trioserve.chat.prefill import Part, begun_with, render_open
from trioserve.chat.template import CHATML, ChatTemplate
from trioserve.chat.thinking import after_thinking, thinking_of, visible_tokens
from trioserve.chat.tool_choice import ToolChoice, choose
from trioserve.chat.tool_grammar import constrain
from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.dispatch import Dispatcher
from trioserve.engine import (
    AnyBackend,
    EmbeddingBackend,
    EmbeddingEngine,
    Engine,
    load_strategy,
)
from trioserve.engine.backend import Vocab
from trioserve.engine.loop import Loop
from trioserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelLoadError,
    NotSupportedError,
    ServerClosingError,
    TemplateError,
    UnavailableError,
)
from trioserve.lifecycle import Driver, Loader, in_thread, load_backend
from trioserve.metrics import Metrics
from trioserve.request_log import RequestLog
from trioserve.slot_files import SlotFiles
from trioserve.stream import ChatChunk, ChatCompletion, ChatStream, Completion, Stream
from trioserve.types import (
    CancelReason,
    Chunk,
    Constraint,
    Embedded,
    EmbeddingTask,
    EngineStatus,
    Grammar,
    ModelInfo,
    Options,
    SamplingParams,
    Task,
    Thinking,
    ThinkingBudget,
    TokenId,
    TokenProbs,
)
from trioserve.vectors import Embeddings, Ranking, Shape

_T = TypeVar("_T")

#: Work on text up to this length (characters) is done on the event loop: it takes about 1 ms.
_SHORT_TEXT = 4096

#: Vectors with more numbers than this, all together, are normalized in a thread.
_MANY_NUMBERS = 65536

#: Seconds that a grammar may take to compile, the wait for those before it included.
_COMPILE_TIMEOUT = 10.0

#: Seconds in which an engine that does nothing answers, on a busy machine too.
_ANSWER_TIMEOUT = 5.0

_OPTION_NAMES = frozenset(attrs.fields_dict(Options)) - {"sampling"}
_SAMPLING_NAMES = frozenset(attrs.fields_dict(SamplingParams))


class Server:
    """A loaded model, ready for requests inside ``async with Server(config) as server:``.

    Entering loads the model in a worker thread. Leaving ends what still runs (its readers get a
    `ServerClosingError`), joins the inference thread and frees the memory; call `drain` before to
    let requests finish. Any Trio cancel scope around a call cancels its work in the engine.

    Args:
        config: what to load and how; the default is the bundled model.
        load: loads the model. The default loads a GGUF file with llama.cpp.
        drive: runs the engine. The default gives it a thread.

    Raises:
        ModelLoadError: on entry, when the model cannot be loaded.
        BridgeError: on entry, when the system has no descriptors left.
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
        self._ids = itertools.count(1)
        self._n_open = AsyncValue(0)
        self._worker = trio.CapacityLimiter(1)
        self._compiler = trio.CapacityLimiter(1)
        self._slot_files: SlotFiles | None = None
        self._life: AbstractAsyncContextManager[None] | None = None

    async def __aenter__(self) -> Server:
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
                await trio.to_thread.run_sync(self._introduce, backend)
                async with self._serve():
                    yield
        finally:
            bridge.close()

    def _note_progress(self, share: float) -> None:
        self.load_progress = share

    def _introduce(self, backend: AnyBackend) -> None:
        """Get to know the model. In a thread: a template takes a while to compile and probe."""
        self.info, self.vocab = backend.info, backend.vocab
        self.n_ctx_seq, self.n_slots = backend.n_ctx_seq, backend.n_slots
        #: The LoRA adapters, and which of them requests get that name none.
        self.lora = AdapterScales(() if isinstance(backend, EmbeddingBackend) else backend.adapters)
        try:
            self.template = ChatTemplate(
                source_of(self.config.chat_template or self.info.chat_template or CHATML),
                bos_token=self.info.bos_token,
                eos_token=self.info.eos_token,
            )
            self._template_variables = self.config.template_variables
            if self.config.reasoning == "auto" and self.template.capabilities.thinking_variable:
                self._template_variables.setdefault("enable_thinking", True)
            self._visible = visible_tokens(
                self.template.format, self.vocab.pieces, self.vocab.names
            )
        except TemplateError as error:
            raise ModelLoadError(f"The chat template cannot be used: {error.message}") from error
        self._admission = Admission(self.config, self.dispatcher, self.n_slots)
        weights = self.config.api_key_weights
        self._weights = dict(zip(self.config.api_keys, weights, strict=False))
        self._defaults = Options(
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

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        go_on: Part | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat with the model's template.

        Args:
            messages: the chat, in OpenAI's form.
            tools: functions that the model may call, in OpenAI's form.
            add_generation_prompt: whether the prompt ends with the head of an answer.
            go_on: a part of the last message, to be left open. Then there is no head.
            template_kwargs: variables for the template, beside those of the configuration.

        Raises:
            TemplateError: the template refuses the messages.
            InvalidRequestError: a message is malformed.
        """
        self._check_open()
        render = (
            partial(self.template.render, add_generation_prompt=add_generation_prompt)
            if go_on is None
            else partial(render_open, self.template, self.template.format, part=go_on)
        )
        variables = {**self._template_variables, **(template_kwargs or {})}
        work = partial(render, messages, tools=tools, kwargs=variables)
        return await self._work(work, _n_chars([messages, tools]))

    async def tokenize_rendered(self, text: str) -> tuple[TokenId, ...]:
        """Turn what `render` made into the token ids that a chat begins with.

        Raises:
            InvalidRequestError: the text cannot be encoded.
        """
        bos = self.info.bos_token
        # Templates write BOS themselves; the tokenizer must not add a second one.
        return await self.tokenize(text, add_special=not (bos and text.startswith(bos)))

    async def _work(self, work: Callable[[], _T], n_chars: int) -> _T:
        """Do short work here and long work in a thread; either way a checkpoint."""
        if n_chars <= _SHORT_TEXT:
            await trio.lowlevel.checkpoint()
            self._check_open()
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._worker)

    # -- requests

    def options(self, settings: Mapping[str, Any], base: Options | None = None) -> Options:
        """Make options from settings, by the field names of `Options` and `SamplingParams`.

        What is not set is as in `base`, or as the server's configuration says.

        Raises:
            InvalidRequestError: a setting is unknown, has the wrong type or is out of range.
        """
        base = base or self._defaults
        if not settings:
            return base
        for name in settings:
            if name not in _OPTION_NAMES and name not in _SAMPLING_NAMES:
                raise InvalidRequestError(f"'{name}' is not an option.", param=name)
        sampling = {name: value for name, value in settings.items() if name in _SAMPLING_NAMES}
        others = {name: value for name, value in settings.items() if name in _OPTION_NAMES}
        return attrs.evolve(base, sampling=attrs.evolve(base.sampling, **sampling), **others)

    @asynccontextmanager
    async def stream(
        self,
        prompt: str | Sequence[TokenId],
        options: Options | None = None,
        *,
        visible: frozenset[TokenId] = frozenset(),
        budget: ThinkingBudget | None = None,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
        **settings: Any,
    ) -> AsyncIterator[Stream]:
        """Continue a prompt, token by token: ``async with server.stream("Once") as events:``.

        Leaving the block before the end, for whatever reason, cancels the request: its slot is
        free within a tick.

        Args:
            prompt: text, or token ids.
            options: how to continue; `settings` change single fields by name.
            visible: control tokens whose names are a part of the output's text.
            budget: ends reasoning that takes too long.
            on_cancel: what the log gives as the reason when the block is cancelled.
            timeout: seconds from now after which the request is cancelled, wherever it is.
            client: whose request it is. In the queue, clients take turns.

        Raises:
            InvalidRequestError: the prompt or an option is wrong.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: from the iteration, when `timeout` has passed.
            ServerClosingError: the server drains, or is closed.
        """
        self.check_generates()
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        options = self.options(settings, options)
        tokens = await self.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)
        weight = self._weights.get(client, 1.0)
        constraint = None
        if options.grammar is not None:
            self._admission.check(len(tokens))  # before work that may be for nothing
            constraint = await self._compile(options.grammar, deadline)
        task = Task(
            next(self._ids),
            tokens,
            options,
            client,
            weight,
            constraint,
            visible=visible,
            budget=budget,
            adapters=self.lora.choose(options.lora),
        )
        with self._request(task, on_cancel, deadline) as stream:
            yield stream

    async def _compile(self, grammar: Grammar, deadline: float) -> Constraint:
        """Compile a grammar in a thread. When cancelled, the thread goes on by itself.

        Raises:
            InvalidRequestError: the grammar cannot be used, or takes too long.
            DeadlineExceededError: the deadline of the request passes.
        """
        self._check_open()
        until = min(deadline, trio.current_time() + _COMPILE_TIMEOUT)
        with trio.move_on_at(until):
            return await trio.to_thread.run_sync(
                self._engine.backend.compile,
                grammar,
                limiter=self._compiler,
                abandon_on_cancel=True,
            )
        if deadline <= until:
            raise DeadlineExceededError("The request's deadline has passed.")
        raise InvalidRequestError(
            f"'{grammar.param}' was not compiled within {_COMPILE_TIMEOUT:g} seconds.",
            param=grammar.param,
        )

    @contextmanager
    def _request(
        self, task: Task | EmbeddingTask, on_cancel: CancelReason, deadline: float
    ) -> Iterator[Stream]:
        """Open a request and close it. All of it is synchronous: no await, no gap."""
        self._check_open()
        self._loop.check(task)
        self._admission.check(len(task.prompt))
        mailbox = self.dispatcher.open(task.id, len(task.prompt), deadline)
        stream = Stream(task.prompt, mailbox, self.dispatcher)
        self._n_open.value += 1
        try:
            with RequestLog(self.info.name, stream, on_cancel, self.metrics):
                self._loop.submit(task)
                yield stream
        finally:
            self.dispatcher.close(mailbox)
            self._n_open.value -= 1
            if stream.finished is not None:
                timings = stream.finished.timings
                self._admission.observe(timings.prompt_ms + timings.predicted_ms)

    @asynccontextmanager
    async def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Options | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | ToolChoice = "auto",
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool = True,
        go_on: Part | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_format: str | None = None,
        reasoning_budget: int = -1,
        reasoning_message: str | None = None,
        reasoning_control: bool = False,
        parse_tools: bool = True,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
        **settings: Any,
    ) -> AsyncIterator[ChatStream]:
        """Answer a chat, token by token. Like `stream`, with `ChatChunk` in place of `Chunk`.

        Args:
            messages: the chat, in OpenAI's form: ``[{"role": "user", "content": "Hi"}]``.
            options: how to answer; `settings` change single fields by name.
            tools: functions that the model may call, in OpenAI's form.
            tool_choice: "auto", "none", "required", or the name of the function to call.
            parallel_tool_calls: whether an answer may have several calls. By default it may
                where the template shows several.
            add_generation_prompt: whether the prompt ends with the head of an answer.
            go_on: a part of the last message, which is the assistant's, that the model goes on
                with: "content", "reasoning_content" or "auto". The answer is what it adds.
            template_kwargs: variables for the template, such as ``enable_thinking``.
            reasoning_format: where reasoning goes, as in llama-server.
            reasoning_budget: most tokens of reasoning; 0: it ends at once.
            reasoning_message: the last words of reasoning whose budget is used up. What is not
                said of reasoning, or is -1, is as the server's configuration says.
            reasoning_control: whether `end_reasoning` may end it.
            parse_tools: whether tool calls are taken out of the text.
            on_cancel: what the log gives as the reason when the block is cancelled.
            timeout: seconds from now after which the request is cancelled, wherever it is.
            client: whose request it is. In the queue, clients take turns.

        Raises:
            QueueFullError: too many requests wait already.
            DeadlineExceededError: from the iteration, when `timeout` has passed.
            TemplateError: the template refuses the messages.
            InvalidRequestError: the messages or an option are wrong.
            ServerClosingError: the server drains, or is closed.
        """
        self.check_generates()
        arrived = trio.current_time()
        choice = choose(tool_choice, tools or ())
        has_place = self.template.capabilities.supports_tools
        text = await self.render(
            messages,
            # By text, the model would be told to call them.
            tools=tools if has_place or choice.mode != "none" else None,
            add_generation_prompt=add_generation_prompt,
            go_on=go_on,
            template_kwargs=template_kwargs,
        )
        prompt = await self.tokenize_rendered(text)
        format = self.template.format
        tail = text[-256:] if go_on is None else begun_with(messages, go_on, format)
        if reasoning_format is None:
            reasoning_format = self.config.reasoning_format
        if self.config.skip_chat_parsing:
            parse_tools, reasoning_format = False, "none"
        parser = MessageParser(
            format,
            parse_tools=parse_tools and choice.mode != "none",
            reasoning_format=reasoning_format,
            tools=tools or (),
            prompt_tail=tail,
        )
        if parallel_tool_calls is None:
            can = self.template.capabilities
            parallel_tool_calls = can.supports_parallel_tool_calls or not has_place
        options = self.options(settings, options)
        make = partial(
            constrain,
            format,
            tools or (),
            choice,
            parallel=parallel_tool_calls,
            prompt_tail=tail,
            answer=options.grammar,
        )
        options = attrs.evolve(options, grammar=await self._work(make, _n_chars(tools)))
        thinking = thinking_of(format, tail, may_begin=go_on is None)
        if options.grammar is not None:
            grammar = after_thinking(options.grammar, format, thinking, reasoning_format)
            options = attrs.evolve(options, grammar=grammar)
        if options.grammar is not None and not options.grammar.begins_late:
            thinking = None  # all of the output is as the grammar says
        if reasoning_budget < 0:
            reasoning_budget = self.config.reasoning_budget
        budget = None
        if thinking is not None and (reasoning_budget >= 0 or reasoning_control):
            budget = await self._budget(thinking, reasoning_budget, reasoning_message)
        if timeout is not None:
            timeout -= trio.current_time() - arrived
        async with self.stream(
            prompt,
            options,
            visible=self._visible,
            budget=budget,
            on_cancel=on_cancel,
            timeout=timeout,
            client=client,
        ) as stream:
            yield ChatStream(stream, parser, text)

    async def _budget(
        self, thinking: Thinking, n_tokens: int, message: str | None
    ) -> ThinkingBudget:
        if message is None:
            message = self.config.reasoning_budget_message
        texts = (message, thinking.end)
        closing = [await self.tokenize(text, add_special=False) for text in texts if text]
        return ThinkingBudget(
            thinking=thinking, n_tokens=n_tokens, closing=tuple(itertools.chain(*closing))
        )

    async def end_reasoning(self, stream: ChatStream) -> bool:
        """Have an answer end its reasoning now, if it is in it. May be cancelled.

        Returns whether it could: the answer still runs, the model can think, and
        `reasoning_control` or a budget was set.

        Raises:
            ServerClosingError: the server is closed.
        """
        if not self.ready:
            raise ServerClosingError
        return await self.dispatcher.call(partial(self._engine.end_thinking, stream.task_id))

    async def complete(
        self, prompt: str | Sequence[TokenId], options: Options | None = None, **settings: Any
    ) -> Completion:
        """Continue a prompt, and return all of it at the end. Arguments are those of `stream`.

        Raises:
            TrioServeError: as `stream`, and when the request fails.
        """
        texts: list[str] = []
        tokens: list[TokenId] = []
        probs: list[TokenProbs] = []
        async with self.stream(prompt, options, **settings) as stream:
            async for event in stream:
                if isinstance(event, Chunk):
                    texts.append(event.text)
                    tokens += event.tokens
                    probs += event.probs
        assert stream.finished is not None
        return Completion(
            text="".join(texts),
            tokens=tuple(tokens),
            probs=tuple(probs),
            prompt=stream.prompt,
            finished=stream.finished,
        )

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Options | None = None,
        **settings: Any,
    ) -> ChatCompletion:
        """Answer a chat, and return the message at the end. Arguments: those of `stream_chat`.

        Raises:
            TrioServeError: as `stream_chat`, and when the request fails.
        """
        tokens: list[TokenId] = []
        probs: list[TokenProbs] = []
        async with self.stream_chat(messages, options, **settings) as stream:
            async for event in stream:
                if isinstance(event, ChatChunk):
                    tokens += event.tokens
                    probs += event.probs
        assert stream.finished is not None
        return ChatCompletion(
            message=stream.message,
            tokens=tuple(tokens),
            probs=tuple(probs),
            prompt=stream.prompt,
            prompt_text=stream.prompt_text,
            finished=stream.finished,
        )

    # -- vectors

    def check_generates(self) -> None:
        """Refuse work that makes text where the server makes vectors.

        Raises:
            NotSupportedError: it was started with `embeddings` or `reranking`.
        """
        self._engine  # noqa: B018 (raises)

    def check_embeds(self) -> EmbeddingEngine:
        """Refuse work that makes vectors where the server makes text, or ranks.

        Raises:
            NotSupportedError: it was not started with `embeddings`, or its model ranks.
        """
        if not isinstance(self._loop, EmbeddingEngine):
            raise NotSupportedError(
                "This server does not support embeddings. Start it with `--embeddings`"
            )
        if self._loop.backend.pooling == "rank":
            raise NotSupportedError("This server ranks documents, and has no vectors for them.")
        return self._loop

    def check_ranks(self) -> EmbeddingEngine:
        """Refuse documents to be ranked where the model does not do that.

        Raises:
            NotSupportedError: the server was not started with `reranking`.
        """
        if not isinstance(self._loop, EmbeddingEngine) or self._loop.backend.pooling != "rank":
            raise NotSupportedError(
                "This server does not support reranking. Start it with `--reranking`"
            )
        return self._loop

    async def embed(
        self,
        inputs: str | Sequence[str | Sequence[TokenId]],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
    ) -> Embeddings:
        """Make a vector of each text. Cancelling it frees the engine within a tick.

        Args:
            inputs: a text, or any number of texts and of lists of token ids.
            dimensions: keep so many numbers of each vector. Good for models that were trained
                so that the first ones say most.
            normalize: the norm that vectors get, as `Config.embd_normalize`; that is the default.
                With pooling "none" there is no norm.
            priority: -100 to 100; higher goes first in the queue.
            on_cancel: what the log gives as the reason when the call is cancelled.
            timeout: seconds from now after which the request is cancelled, wherever it is.
            client: whose request it is. In the queue, clients take turns.

        Raises:
            InvalidRequestError: a text has no tokens or too many, or an option is out of range.
            NotSupportedError: the server was not started with `embeddings`, or its model ranks.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: `timeout` has passed.
            ServerClosingError: the server drains, or is closed.
        """
        self._check_open()
        engine = self.check_embeds()
        pooled = engine.backend.pooling != "none"
        if not pooled and not (normalize in (None, -1) and dimensions is None):
            raise InvalidRequestError(
                "Vectors of single tokens are neither cut nor normalized.",
                param="dimensions" if dimensions is not None else "embd_normalize",
            )
        shape = Shape(
            normalize=self.config.embd_normalize if normalize is None else normalize,
            dimensions=dimensions,
        )
        shape.check(engine.backend.width)
        deadline = math.inf if timeout is None else trio.current_time() + timeout

        def tokens_of(text: str | Sequence[TokenId]) -> tuple[TokenId, ...]:
            if isinstance(text, str):
                return self.vocab.tokenize(text, add_special=True, parse_special=True)
            return tuple(text)

        inputs = [inputs] if isinstance(inputs, str) else inputs
        make = partial(self._embedding_task, map(tokens_of, inputs), client, priority, "input")
        task = await self._work(make, sum(map(len, inputs)))
        with self._request(task, on_cancel, deadline) as stream:
            done = await _embedded(stream)
            vectors = done.vectors
            if pooled:
                size = len(inputs) * engine.backend.width
                apply = partial(shape.apply, vectors)
                vectors = (
                    await trio.to_thread.run_sync(apply, limiter=self._worker)
                    if size > _MANY_NUMBERS
                    else apply()
                )
        return Embeddings(vectors, tuple(map(len, task.texts)), done.timings)

    async def rerank(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        priority: int = 0,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
    ) -> Ranking:
        """Score how well each document fits a query; see `Ranking.best`. Arguments as in `embed`.

        Raises:
            InvalidRequestError: there are no documents, or one is too long.
            NotSupportedError: the server was not started with `reranking`.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: `timeout` has passed.
            ServerClosingError: the server drains, or is closed.
        """
        self._check_open()
        pair = self.check_ranks().backend.pair
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        documents = [documents] if isinstance(documents, str) else documents
        texts = (pair(query, document) for document in documents)
        make = partial(self._embedding_task, texts, client, priority, "documents")
        n_chars = len(query) * len(documents) + sum(map(len, documents))
        task = await self._work(make, n_chars)
        with self._request(task, on_cancel, deadline) as stream:
            done = await _embedded(stream)
        scores = tuple(float(matrix[0, 0]) for matrix in done.vectors)
        return Ranking(scores, tuple(map(len, task.texts)), done.timings)

    def _embedding_task(
        self, texts: Iterable[tuple[TokenId, ...]], client: str, priority: int, param: str
    ) -> EmbeddingTask:
        """Make a task, and all that is asked of it later. With many texts it takes a while."""
        weight = self._weights.get(client, 1.0)
        task = EmbeddingTask(next(self._ids), tuple(texts), client, weight, priority, param)
        task.look()
        return task

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


async def _embedded(stream: Stream) -> Embedded:
    """Wait for the one event of a task that makes vectors."""
    async for event in stream:
        if isinstance(event, Embedded):
            return event
    raise AssertionError("a stream ends with its last event")


def _n_chars(value: Any) -> int:
    """Add up the text in a JSON value; stops counting when it is no longer short."""
    total = 0
    values = [value]
    while values and total <= _SHORT_TEXT:
        value = values.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Sequence):
            values += value
        total += 8  # whatever it is, it takes some time to render
    return total
