"""Text generation: completions of prompts and answers to chats, with any number of outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import trio

from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.grammar.answer import after_thinking, constrain
from trioserve.chat.messages import documents_in
from trioserve.chat.params import ChatParams, ToolChoice, choose
from trioserve.chat.parse.parser import aside_of, message_parser, thinking_of
from trioserve.chat.template.continuation import continued_prompt_tail
from trioserve.chat.template.plain import turn_ends
from trioserve.engine import Engine
from trioserve.errors import InvalidRequestError, UnavailableError, UnsupportedFieldError
from trioserve.fair_limiter import FairLimiter, ThreadTime, Workers
from trioserve.left_out import leave_out
from trioserve.server.adapters import AdapterScales
from trioserve.server.context import RequestContext
from trioserve.server.dispatch import CANDIDATE_BYTES
from trioserve.server.generation.requests import Requests
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.model import LoadedModel
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import (
    AnyPrompt,
    ChatPrompts,
    Messages,
    PromptLog,
    Tokenizer,
    n_chars,
)
from trioserve.server.stream import ChatStream, Completion, Stream
from trioserve.types import (
    MAX_OUTPUTS,
    CacheRoot,
    Constraint,
    GenerationParams,
    Grammar,
    Prompt,
    Task,
    Thinking,
    ThinkingBudget,
    TokenId,
)
from trioserve.types.params import changed

#: A seed that means a random seed for each output, as -1 does.
RANDOM_SEED = 2**32 - 1

#: Threads that compile grammars, and those that one client may have. They compile in turns, so more
#: would make the grammars of others wait longer.
_N_COMPILERS, _N_COMPILERS_EACH = 3, 2

#: Seconds that compiling a grammar may take. If the thread computed for less than a part of them,
#: other work had the CPU, and the grammar is not at fault.
_COMPILE_TIMEOUT = 10.0
_AT_FAULT = 0.5

#: Seconds after which a client may send a request again that other work has delayed.
_RETRY_AFTER = 5.0


def check_copies(n: int) -> None:
    """Check the number of outputs of a prompt. Raises InvalidRequestError."""
    if not 1 <= n <= MAX_OUTPUTS:
        raise InvalidRequestError.at("n", f"must be between 1 and {MAX_OUTPUTS}.")


def copies_of(params: GenerationParams, n: int) -> list[GenerationParams]:
    """Make the parameters of `n` outputs of one prompt, with consecutive seeds as in llama-server.

    Only the first keeps the requested slot.
    """
    seed = params.sampling.seed
    copies = [params]
    for i in range(1, n):
        sampling = params.sampling
        if seed not in (-1, RANDOM_SEED):
            sampling = changed(sampling, {"seed": (seed + i) % 2**32})
        copies.append(changed(params, {"sampling": sampling, "id_slot": -1}))
    return copies


def best_of(outputs: Sequence[Completion], n_copies: int, n: int) -> list[Completion]:
    """Keep, for each prompt, the `n` outputs with the highest mean token probability.

    The `n_copies` outputs of a prompt are adjacent. They need `n_probs`.
    """
    if n_copies == n:
        return list(outputs)
    best = []
    for start in range(0, len(outputs), n_copies):
        best += sorted(outputs[start : start + n_copies], key=_mean_logprob, reverse=True)[:n]
    return best


def _mean_logprob(output: Completion) -> float:
    logprobs = [each.chosen.logprob for each in output.probs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _hold_scores(hold: MemoryReservation, prompt: Prompt, params: GenerationParams, n: int) -> None:
    """Reserve memory for the scores of a prompt, once for each of `n` outputs.

    Raises:
        InvalidRequestError: the prompt has media, which have no scores.
        MemoryFullError: the memory budget has no room for them.
        PayloadTooLargeError: they exceed what one request may hold.
    """
    if params.prompt_logprobs is None:
        return
    if prompt.media:
        raise InvalidRequestError.at("prompt_logprobs", "and media exclude each other.")
    hold.grow(n * len(prompt) * (params.prompt_logprobs + 1) * CANDIDATE_BYTES)


@attrs.frozen(kw_only=True)
class ChatOpening:
    """The properties of a chat that reading its answers needs, beside their streams."""

    prompt_text: str
    prompt_tail: str  # how the prompt ends
    parse_tools: bool
    reasoning_format: str
    is_formatted: bool  # whether a grammar determines all of the answer

    def answer(
        self,
        stream: Stream,
        format: ChatFormat,
        tools: Sequence[Mapping[str, Any]],
        end_thinking: Callable[[int], Awaitable[bool]],
    ) -> ChatStream:
        """Make the stream that parses an answer.

        Args:
            end_thinking: ends the reasoning of a task; see `ChatStream.end_reasoning`.
        """
        parser = message_parser(
            format,
            parse_tools=self.parse_tools,
            reasoning_format=self.reasoning_format,
            tools=tools,
            prompt_tail=self.prompt_tail,
            is_formatted=self.is_formatted,
        )
        return ChatStream(stream, parser, self.prompt_text, partial(end_thinking, stream.task_id))


@attrs.define(eq=False, slots=False)
class TextGenerator:
    """Generates completions and chat answers with an engine."""

    model: LoadedModel  # has the template
    _engine: Engine  # generates text
    _requests: Requests  # opens a request for each output
    _tokenizer: Tokenizer  # turns prompts into tokens
    _workers: Workers  # threads for long texts
    _prompts: ChatPrompts  # renders chats
    _adapters: AdapterScales  # the LoRA adapters

    def __attrs_post_init__(self) -> None:
        self._resources = self._requests.resources
        self._config = self._resources.config
        self._prompt_log: PromptLog | None = None
        if self._config.log_prompts_dir:
            self._prompt_log = PromptLog(self._config.log_prompts_dir, self.model.vocab)
        self._turn_ends = turn_ends(self.model.template.source)
        #: Control tokens whose names appear in every output.
        self._shown = frozenset(self.model.vocab.control if self._config.special else ())
        #: The threads that compile grammars. Cancelled callers leave theirs running.
        self.compilers = FairLimiter(_N_COMPILERS, _N_COMPILERS_EACH)

    # -- prompts

    async def stream(
        self,
        stack: AsyncExitStack,
        prompts: Sequence[AnyPrompt],
        params: GenerationParams,
        context: RequestContext,
        n: int,
    ) -> list[Stream]:
        """Open the streams of `ModelServer.stream_all`; `stack` closes them."""
        hold = stack.enter_context(self._resources.memory.hold(context.client))
        root = self._resources.cache_root(context.client, params.cache_salt)
        scope = root.owner + root.salt
        made = [await self._prompt_of(prompt, context, hold, scope) for prompt in prompts]
        for prompt in made:
            _hold_scores(hold, prompt, params, n)
        tasks = [
            task for each in made for task in await self._tasks(each, params, context, n, root)
        ]
        return [
            stack.enter_context(self._requests.open(task, context, "text_completion"))
            for task in tasks
        ]

    async def _prompt_of(
        self, prompt: AnyPrompt, context: RequestContext, hold: MemoryReservation, scope: str
    ) -> Prompt:
        if not isinstance(prompt, MixedPrompt):
            return await self._tokenizer.prompt_of(prompt, fits=True)
        self._requests.check_room(context)
        return await self._prompts.media.prompt_of(
            prompt.parts, hold, scope=scope, add_special=True
        )

    async def _tasks(
        self,
        prompt: Prompt,
        params: GenerationParams,
        context: RequestContext,
        n: int,
        root: CacheRoot,
        *,
        preserved_tokens: frozenset[TokenId] = frozenset(),
        **fields: Any,
    ) -> list[Task]:
        """Make the tasks of `n` outputs of a prompt."""
        if params.lora or self._adapters.infos:
            root = root._replace(adapters=self._adapters.choose(params.lora))
        constraint = None
        if (grammar := params.grammar) is not None:
            if params.sampling.min_tokens:
                leave_out("min_tokens", "a grammar, or that of tools, decides where an output ends")
                sampling = changed(params.sampling, {"min_tokens": 0})
                params = changed(params, {"sampling": sampling})
            self._requests.check_room(context, len(prompt))  # reject before more work
            constraint = await self._compile(grammar, root.owner)
        shown = self._shown if params.skip_special_tokens else frozenset(self.model.vocab.control)
        tasks = [
            Task(
                next(self._resources.task_ids),
                prompt,
                copy,
                context.client,
                self._resources.weight_of(context.client),
                constraint,
                preserved_tokens=preserved_tokens | shown,
                special=bool(shown),
                root=root,
                **fields,
            )
            for copy in copies_of(params, n)
        ]
        if self._prompt_log is not None:
            for task in tasks:
                await self._prompt_log.write(task.id, prompt)
        return tasks

    async def _compile(self, grammar: Grammar, owner: str) -> Constraint:
        """Compile a grammar in a thread. When cancelled, the thread is abandoned.

        Raises:
            InvalidRequestError: the grammar is invalid, or compiling it takes too long.
            UnavailableError: it takes too long because of other work.
            QueueFullError: too many grammars of the client wait for a thread.
        """
        thread = ThreadTime()

        def compile() -> Constraint:
            thread.begin()
            return self._engine.compile(grammar, owner)

        try:
            return await self.compilers.run_sync(
                compile, seconds=_COMPILE_TIMEOUT, abandon_on_cancel=True
            )
        except trio.TooSlowError:
            pass
        problem = f"'{grammar.param}' was not compiled within {_COMPILE_TIMEOUT:g} seconds"
        if thread.seconds > _AT_FAULT * _COMPILE_TIMEOUT:
            raise InvalidRequestError(f"{problem}.", param=grammar.param)
        raise UnavailableError(
            f"{problem}, because of other work.", param=grammar.param, retry_after=_RETRY_AFTER
        )

    # -- chats

    async def open_chats(
        self,
        stack: AsyncExitStack,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        context: RequestContext,
        n: int,
    ) -> tuple[ChatOpening, list[Stream]]:
        """Open the streams of `ModelServer.stream_chats`; `stack` closes them."""
        choice = self._choice(chat)
        hold = stack.enter_context(self._resources.memory.hold(context.client))
        root = self._resources.cache_root(context.client, params.cache_salt)
        text, prompt, tail = await self._rendered(messages, chat, choice, context, hold, root)
        _hold_scores(hold, prompt, params, n)
        chat = self._with_defaults(chat, choice)
        format = self.model.template.format
        thinking = thinking_of(format, tail, may_begin=chat.continue_final_message is None)
        calls = bool(chat.tools) and choice.mode != "none"
        if not (thinks := self._thinks(chat)):
            chat = attrs.evolve(chat, reasoning_budget=0, reasoning_message="")
            if format.channels is not None and not calls and (thinking or params.grammar):
                # Nothing but the answer may come, and so its header stands for the end.
                header = "".join(texts[0] for texts in format.channels.answer)
                thinking = Thinking(start="", end=header, begun=True)
        grammar = params.grammar
        is_formatted = grammar is not None and not grammar.lazy
        if calls:
            grammar = await self._grammar(grammar, chat, choice, tail, root.owner)
        if grammar is not None:
            may_think = thinks or (thinking is not None and thinking.begun)
            grammar = after_thinking(
                grammar, format, thinking if may_think else None, chat.reasoning_format or ""
            )
            if not grammar.lazy:
                thinking = None  # the grammar applies to the whole output
        if grammar is not params.grammar:
            params = changed(params, {"grammar": grammar})
        tasks = await self._tasks(
            prompt,
            params,
            context,
            n,
            root,
            preserved_tokens=self.model.preserved_tokens,
            budget=await self._budget(thinking, chat),
            turn_ends=self._turn_ends,
            aside=aside_of(format, tail) if chat.reasoning_format != "none" else None,
        )
        assert chat.reasoning_format is not None
        opening = ChatOpening(
            prompt_text=text,
            prompt_tail=tail,
            parse_tools=chat.parse_tools,
            reasoning_format=chat.reasoning_format,
            is_formatted=is_formatted,
        )
        return opening, [
            stack.enter_context(self._requests.open(task, context, "chat")) for task in tasks
        ]

    async def end_thinking(self, task_id: int) -> bool:
        """End the reasoning of an answer; see `ModelServer.end_thinking`."""
        return await self._requests.dispatcher.call(partial(self._engine.end_thinking, task_id))

    def _thinks(self, chat: ChatParams) -> bool:
        """True if the model may think before it answers. A continued answer has begun."""
        if chat.continue_final_message is not None:
            return True
        is_off = self.model.variables_of(chat).get("enable_thinking") is False
        return not is_off and self.model.template.format.thinking is not None

    def _choice(self, chat: ChatParams) -> ToolChoice:
        choice = choose(chat.tool_choice, chat.tools or ())
        if choice.mode != "auto" and not self.model.template.takes_tools:
            raise UnsupportedFieldError.at(
                "tool_choice", "needs templates in Jinja, and this server runs with --no-jinja."
            )
        return choice

    async def _rendered(
        self,
        messages: Messages,
        chat: ChatParams,
        choice: ToolChoice,
        context: RequestContext,
        hold: MemoryReservation,
        root: CacheRoot,
    ) -> tuple[str, Prompt, str]:
        """Render a chat. Returns the text, the prompt, and how the prompt ends."""
        template = self.model.template
        # Without template support, the prompt's text would ask the model to call tools.
        if choice.mode == "none" and not template.capabilities.supports_tools:
            chat = attrs.evolve(chat, tools=None)
        parsed = await self._prompts.parse(messages)
        if any(map(documents_in, parsed)):
            self._requests.check_room(context)  # reject before reading documents
        marked = await self._prompts.mark(parsed, hold)
        if marked.media:
            self._requests.check_room(context)  # reject before loading media
        text = await self._prompts.render(marked.messages, chat)
        scope = root.owner + root.salt
        prompt = await self._prompts.prompt_of(text, marked, chat, hold, scope)
        part = chat.continue_final_message
        if part is None:
            return text, prompt, text[-256:]
        return text, prompt, continued_prompt_tail(marked.messages, part, template.format)

    def _with_defaults(self, chat: ChatParams, choice: ToolChoice) -> ChatParams:
        """Fill unset fields of a chat with the defaults of the configuration and the model."""
        can, parallel = self.model.template.capabilities, chat.parallel_tool_calls
        if parallel is None:
            parallel = can.supports_parallel_tool_calls or not can.supports_tools
        skips = self._config.skip_chat_parsing
        return attrs.evolve(
            chat,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            parse_tools=chat.parse_tools and choice.mode != "none" and not skips,
            reasoning_format="none"
            if skips
            else chat.reasoning_format or self._config.reasoning_format,
        )

    async def _grammar(
        self,
        answer: Grammar | None,
        chat: ChatParams,
        choice: ToolChoice,
        tail: str,
        owner: str,
    ) -> Grammar | None:
        """Make the grammar of an answer, including required tool calls."""
        make = partial(
            constrain,
            self.model.template.format,
            chat.tools or (),
            choice,
            parallel=chat.parallel_tool_calls or False,
            prompt_tail=tail,
            answer=answer,
            owner=owner,
        )
        return await self._workers.offload(make, n_chars(chat.tools))

    async def _budget(self, thinking: Thinking | None, chat: ChatParams) -> ThinkingBudget | None:
        """Make the reasoning budget of an answer; None if it needs none."""
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
            (await self._tokenizer.prompt_of(text, add_special=False, is_fragment=True)).tokens
            for text in texts
            if text
        ]
        return ThinkingBudget(
            thinking=thinking, n_tokens=n_tokens, closing=tuple(itertools.chain(*closing))
        )
