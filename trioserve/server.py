"""`Server`: a model that answers requests, as long as an ``async with`` block runs.

This is the one place where the parts are joined: the model and its engine on the inference
thread, the bridge, and the requests on the Trio event loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

import attrs
import trio
from trio_util import AsyncValue

from trioserve import llama
from trioserve.admission import Admission
from trioserve.bridge import open_bridge
from trioserve.chat.parser import MessageParser
from trioserve.chat.prefill import Part, begun_with, render_open
from trioserve.chat.template import CHATML, ChatTemplate
from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.dispatch import Dispatcher
from trioserve.engine import Engine, load_strategy
from trioserve.engine.backend import Backend, Vocab
from trioserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelLoadError,
    ServerClosingError,
    TemplateError,
    UnavailableError,
)
from trioserve.lifecycle import Driver, Loader, in_thread, load_backend
from trioserve.request_log import RequestLog
from trioserve.stream import ChatChunk, ChatCompletion, ChatStream, Completion, Stream
from trioserve.types import (
    CancelReason,
    Chunk,
    Constraint,
    EngineStatus,
    Grammar,
    ModelInfo,
    Options,
    SamplingParams,
    Task,
    TokenId,
    TokenProbs,
)

_T = TypeVar("_T")

#: Work on text up to this length (characters) is done on the event loop: it takes about 1 ms.
_SHORT_TEXT = 4096

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
        self._ids = itertools.count(1)
        self._n_open = AsyncValue(0)
        self._worker = trio.CapacityLimiter(1)
        self._compiler = trio.CapacityLimiter(1)
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
            self._engine = Engine(
                backend,
                strategy,
                bridge.notify,
                cache_ram=self.config.cache_ram * 2**20,
                context_shift=self.config.context_shift,
                flush_interval=self.config.stream_interval_ms / 1e3,
            )
            self.dispatcher = Dispatcher(
                self._engine,
                bridge,
                unread_tokens=self.config.unread_tokens,
                stall_timeout=self.config.stall_timeout,
            )
            async with self._drive(self._engine):
                await trio.to_thread.run_sync(self._introduce, backend)
                async with self._serve():
                    yield
        finally:
            bridge.close()

    def _note_progress(self, share: float) -> None:
        self.load_progress = share

    def _introduce(self, backend: Backend) -> None:
        """Get to know the model. In a thread: a template takes a while to compile and probe."""
        self.info, self.vocab = backend.info, backend.vocab
        self.n_ctx_seq, self.n_slots = backend.n_ctx_seq, backend.n_slots
        try:
            self.template = ChatTemplate(
                self.config.chat_template or self.info.chat_template or CHATML,
                bos_token=self.info.bos_token,
                eos_token=self.info.eos_token,
            )
            self.template.capabilities  # noqa: B018 (found out now, and kept)
        except TemplateError as error:
            raise ModelLoadError(f"The chat template cannot be used: {error.message}") from error
        self._admission = Admission(self.config, self.dispatcher, self.n_slots)
        weights = self.config.api_key_weights
        self._weights = dict(zip(self.config.api_keys, weights, strict=False))
        self._defaults = Options(
            sampling=self.config.sampling,
            max_tokens=self.config.n_predict,
            cache_prompt=self.config.cache_prompt,
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
            template_kwargs: variables for the template.

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
        work = partial(render, messages, tools=tools, kwargs=template_kwargs or {})
        return await self._work(work, _n_chars([messages, tools]))

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
            on_cancel: what the log gives as the reason when the block is cancelled.
            timeout: seconds from now after which the request is cancelled, wherever it is.
            client: whose request it is. In the queue, clients take turns.

        Raises:
            InvalidRequestError: the prompt or an option is wrong.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: from the iteration, when `timeout` has passed.
            ServerClosingError: the server drains, or is closed.
        """
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        options = self.options(settings, options)
        tokens = await self.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)
        weight = self._weights.get(client, 1.0)
        constraint = None
        if options.grammar is not None:
            self._admission.check(len(tokens))  # before work that may be for nothing
            constraint = await self._compile(options.grammar, deadline)
        task = Task(next(self._ids), tokens, options, client, weight, constraint)
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
    def _request(self, task: Task, on_cancel: CancelReason, deadline: float) -> Iterator[Stream]:
        """Open a request and close it. All of it is synchronous: no await, no gap."""
        self._check_open()
        self._engine.check(task)
        self._admission.check(len(task.prompt))
        mailbox = self.dispatcher.open(task.id, len(task.prompt), deadline)
        stream = Stream(task.prompt, mailbox, self.dispatcher)
        self._n_open.value += 1
        try:
            with RequestLog(self.info.name, stream, on_cancel):
                self._engine.submit(task)
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
        add_generation_prompt: bool = True,
        go_on: Part | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_format: str = "auto",
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
            add_generation_prompt: whether the prompt ends with the head of an answer.
            go_on: a part of the last message, which is the assistant's, that the model goes on
                with: "content", "reasoning_content" or "auto". The answer is what it adds.
            template_kwargs: variables for the template, such as ``enable_thinking``.
            reasoning_format: where reasoning goes, as in llama-server.
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
        arrived = trio.current_time()
        text = await self.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            go_on=go_on,
            template_kwargs=template_kwargs,
        )
        bos = self.info.bos_token
        # Templates write BOS themselves; the tokenizer must not add a second one.
        prompt = await self.tokenize(text, add_special=not (bos and text.startswith(bos)))
        parser = MessageParser(
            self.template.format,
            parse_tools=parse_tools,
            reasoning_format=reasoning_format,
            tools=tools or (),
            prompt_tail=(
                text[-256:] if go_on is None else begun_with(messages, go_on, self.template.format)
            ),
        )
        if timeout is not None:
            timeout -= trio.current_time() - arrived
        request = self.stream(
            prompt, options, on_cancel=on_cancel, timeout=timeout, client=client, **settings
        )
        async with request as stream:
            yield ChatStream(stream, parser, text)

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

    async def status(self) -> EngineStatus:
        """Look at the slots and the queue, between two ticks. May be cancelled.

        Raises:
            ServerClosingError: the server is closed.
        """
        if not self.ready:
            raise ServerClosingError
        status = await self.dispatcher.call(self._engine.status)
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
        if self._engine.failure is not None:
            raise UnavailableError(self._engine.failure.message)
        if monotonic() - self._engine.heartbeat < tick_timeout:
            return
        # The last tick began long ago. It still runs, or was followed by a rest.
        with trio.move_on_after(_ANSWER_TIMEOUT) as scope:
            await self.status()
        if scope.cancelled_caught:
            raise UnavailableError(f"The engine has not ticked for {tick_timeout:g} seconds.")


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
