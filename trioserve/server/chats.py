"""Messages that are answered."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import attrs
import trio

from trioserve.chat.grammar.answer import constrain
from trioserve.chat.grammar.thinking import after_thinking, thinking_of
from trioserve.chat.markers import MarkedMessages, mark
from trioserve.chat.messages import Messages as ParsedMessages, parse_messages
from trioserve.chat.params import ChatParams
from trioserve.chat.parse.parser import MessageParser
from trioserve.chat.template.budget import Limits, OutOfTimeError
from trioserve.chat.template.continuation import continued_prompt_tail, render_continued
from trioserve.chat.template.partings import find_partings
from trioserve.chat.template.render import ChatTemplate
from trioserve.chat.tool_choice import choose
from trioserve.config import Config
from trioserve.errors import UnsupportedFieldError
from trioserve.server.cache_sharing import CacheSharing
from trioserve.server.choices import all_of, check_copies, copies_of
from trioserve.server.completions import Completions
from trioserve.server.context import RequestContext
from trioserve.server.hints import hints_of
from trioserve.server.media_prompts import check_kinds
from trioserve.server.model import LoadedModel
from trioserve.server.stream import ChatCompletion, ChatStream
from trioserve.server.tokens import Tokenizer
from trioserve.server.workers import SMALL, Stop, Workers
from trioserve.types import GenerationParams, Prompt, Thinking, ThinkingBudget, TokenId

#: What a render may take on the event loop.
_QUICK = Limits(seconds=0.004, hurried=True)

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class ChatPrompts:
    """Renders chats with the model's template."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer, workers: Workers) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self._quick = model.template.with_limits(_QUICK)
        self._is_slow = False  # the last render was

    async def mark(self, messages: Messages, marker: str | None = None) -> MarkedMessages:
        """Check messages, and put markers in the place of media. See `markers.mark`.

        Raises:
            InvalidRequestError: a message is malformed.
            UnsupportedFieldError: the model does not take one of the media.
        """
        if isinstance(messages, ParsedMessages):
            parsed = messages
        else:
            parsed = await self._workers.run(lambda _: parse_messages(messages), _n_chars(messages))
        marked = mark(parsed, marker)
        check_kinds(self._model.modalities, marked.media.values())
        return marked

    async def render(self, messages: Messages, chat: ChatParams) -> str:
        """Render messages without media; see `Server.render`."""
        self._workers.check_open()
        size = _n_chars([messages, chat.tools, chat.template_kwargs])
        if size <= SMALL and not self._is_slow:
            await trio.lowlevel.checkpoint()
            try:
                return self._render(self._quick, messages, chat)
            except OutOfTimeError:
                pass  # all is done again, where it may take its time
        return await self._workers.run_in_thread(lambda _: self._render_slowly(messages, chat))

    def _render_slowly(self, messages: Messages, chat: ChatParams) -> str:
        began = time.thread_time()
        try:
            return self._render(self._model.template, messages, chat)
        finally:
            self._is_slow = time.thread_time() - began > _QUICK.seconds

    def _render(self, template: ChatTemplate, messages: Messages, chat: ChatParams) -> str:
        variables = {**self._model.template_variables, **chat.template_kwargs}
        part = chat.continue_final_message
        if part is not None:
            return render_continued(
                template, template.format, messages, part, tools=chat.tools, kwargs=variables
            )
        return template.render(
            messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            kwargs=variables,
        )

    async def tokenize(
        self, text: str, *, fits: bool = False, aside: bool = False
    ) -> tuple[TokenId, ...]:
        """Turn a rendered chat into token ids.

        Templates write BOS themselves, and the tokenizer must not add a second one.
        """
        return await self._tokenizer.tokenize(
            text, add_special=self._adds_special(text), fits=fits, aside=aside
        )

    def _adds_special(self, text: str) -> bool:
        bos = self._model.info.bos_token
        return not (bos and text.startswith(bos))

    async def prompt_of(self, text: str, messages: Messages, chat: ChatParams) -> Prompt:
        """Make a prompt of a rendered chat, with hints where a checkpoint is useful."""
        tokens = await self.tokenize(text, fits=True)
        if not self._model.keeps_checkpoints:
            return Prompt(tokens)
        find = partial(self._hints, text, tokens, messages, chat)
        return Prompt(tokens, hints=await self._workers.run_in_thread(find))

    def _hints(
        self,
        text: str,
        tokens: tuple[TokenId, ...],
        messages: Messages,
        chat: ChatParams,
        stop: Stop,
    ) -> tuple[int, ...]:
        n_given = len(messages) - (chat.continue_final_message is not None)
        partings = find_partings(
            self._model.template,
            text,
            messages[:n_given],
            tools=chat.tools,
            kwargs={**self._model.template_variables, **chat.template_kwargs},
        )
        add_special = self._adds_special(text)
        return hints_of(self._model.vocab, text, tokens, partings, stop, add_special=add_special)


@attrs.frozen
class _Answer:
    """What the engine is to continue, and how its output is read."""

    text: str
    prompt: Prompt
    prompt_tail: str
    params: GenerationParams
    chat: ChatParams
    budget: ThinkingBudget | None


class Chats:
    """Turns chats into prompts, and outputs into messages.

    Args:
        config: what holds for chats that do not say.
        model: has the template.
        tokenizer: makes tokens of the last words of reasoning.
        workers: do the work on long text.
        prompts: renders chats.
        completions: continues prompts.
        sharing: says who may share what is made for a chat.
    """

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        tokenizer: Tokenizer,
        workers: Workers,
        prompts: ChatPrompts,
        completions: Completions,
        sharing: CacheSharing,
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self._prompts = prompts
        self._completions = completions
        self._sharing = sharing

    @asynccontextmanager
    async def stream(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        context: RequestContext,
        *,
        n: int = 1,
    ) -> AsyncIterator[list[ChatStream]]:
        """Answer a chat `n` times, all at the same time. Otherwise like `Server.stream_chat`."""
        check_copies(n, self._model.n_slots)
        context.check_time()
        owner = self._sharing.owner(context.client)
        answer = await self._prepare(messages, params, chat, owner)
        async with AsyncExitStack() as stack:
            streams = []
            for copy in copies_of(answer.params, n):
                opened = self._completions.open(
                    answer.prompt,
                    copy,
                    context,
                    preserved_tokens=self._model.preserved_tokens,
                    budget=answer.budget,
                )
                stream = await stack.enter_async_context(opened)
                streams.append(ChatStream(stream, self._parser(answer), answer.text))
            yield streams

    async def answer(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        context: RequestContext,
        *,
        n: int = 1,
    ) -> list[ChatCompletion]:
        """Answer a chat `n` times, and return all at the end.

        Raises:
            TrioServeError: one of them failed; the others are cancelled.
        """
        async with self.stream(messages, params, chat, context, n=n) as streams:
            return await all_of([stream.read for stream in streams])

    async def _prepare(
        self, messages: Messages, params: GenerationParams, chat: ChatParams, owner: str
    ) -> _Answer:
        """Render a chat, and find out what its answer may look like."""
        choice = choose(chat.tool_choice, chat.tools or ())
        template = self._model.template
        if choice.mode != "auto" and not template.takes_tools:
            raise UnsupportedFieldError(
                "'tool_choice' needs templates in Jinja, and this server runs with --no-jinja.",
                param="tool_choice",
            )
        format, can = template.format, template.capabilities
        # By text, a model whose template knows no tools would be told to call them.
        shown = can.supports_tools or choice.mode != "none"
        shown_chat = chat if shown else attrs.evolve(chat, tools=None)
        messages = (await self._prompts.mark(messages)).messages
        text = await self._prompts.render(messages, shown_chat)
        prompt = await self._prompts.prompt_of(text, messages, shown_chat)
        part = chat.continue_final_message
        tail = text[-256:] if part is None else continued_prompt_tail(messages, part, format)
        chat = attrs.evolve(
            chat,
            tool_choice=choice,
            parse_tools=chat.parse_tools and choice.mode != "none",
            reasoning_format=chat.reasoning_format or self._config.reasoning_format,
        )
        if self._config.skip_chat_parsing:
            chat = attrs.evolve(chat, parse_tools=False, reasoning_format="none")
        parallel = chat.parallel_tool_calls
        if parallel is None:
            parallel = can.supports_parallel_tool_calls or not can.supports_tools
        make = partial(
            constrain,
            format,
            chat.tools or (),
            choice,
            parallel=parallel,
            prompt_tail=tail,
            answer=params.grammar,
            owner=owner,
        )
        grammar = await self._workers.run(lambda _: make(), _n_chars(chat.tools))
        thinking = thinking_of(format, tail, may_begin=part is None)
        if grammar is not None:
            assert chat.reasoning_format is not None
            grammar = after_thinking(grammar, format, thinking, chat.reasoning_format)
            if not grammar.lazy:
                thinking = None  # all of the output is as the grammar says
        budget = await self._budget(thinking, chat)
        return _Answer(text, prompt, tail, attrs.evolve(params, grammar=grammar), chat, budget)

    def _parser(self, answer: _Answer) -> MessageParser:
        assert answer.chat.reasoning_format is not None
        return MessageParser(
            self._model.template.format,
            parse_tools=answer.chat.parse_tools,
            reasoning_format=answer.chat.reasoning_format,
            tools=answer.chat.tools or (),
            prompt_tail=answer.prompt_tail,
        )

    async def _budget(self, thinking: Thinking | None, chat: ChatParams) -> ThinkingBudget | None:
        """Make the budget of an answer that may begin with reasoning; None: it needs none."""
        n_tokens = chat.reasoning_budget
        if n_tokens < 0:
            n_tokens = self._config.reasoning_budget
        if thinking is None or (n_tokens < 0 and not chat.reasoning_control):
            return None
        message = chat.reasoning_message
        if message is None:
            message = self._config.reasoning_budget_message
        texts = (message, thinking.end)
        closing = [
            await self._tokenizer.tokenize(text, add_special=False, is_fragment=True)
            for text in texts
            if text
        ]
        return ThinkingBudget(
            thinking=thinking, n_tokens=n_tokens, closing=tuple(itertools.chain(*closing))
        )


def _n_chars(value: Any) -> int:
    """Add up the text in a JSON value; stops counting when it is no longer short."""
    total = 0
    values = [value]
    while values and total <= SMALL:
        value = values.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Sequence):
            values += value
        total += 8  # whatever it is, it takes some time to render
    return total
