"""The prompts of chats."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import trio

from trioserve.chat.markers import MarkedMessages, mark
from trioserve.chat.messages import Messages as ParsedMessages, parse_messages
from trioserve.chat.params import ChatParams
from trioserve.chat.template.budget import Limits, OutOfTimeError
from trioserve.chat.template.continuation import render_continued
from trioserve.chat.template.partings import find_partings
from trioserve.chat.template.render import ChatTemplate
from trioserve.server.hints import hints_of
from trioserve.server.media_prompts import MediaPrompts, check_kinds
from trioserve.server.memory import Hold
from trioserve.server.model import LoadedModel
from trioserve.server.tokens import Tokenizer
from trioserve.server.workers import SMALL, Stop, Workers
from trioserve.types import Prompt

#: What a render may take on the event loop.
_QUICK = Limits(seconds=0.004, hurried=True)

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class ChatPrompts:
    """Renders chats with the model's template, and makes prompts of them.

    Args:
        model: has the template.
        tokenizer: turns text into tokens.
        workers: do what takes long.
        media: makes prompts that are more than text.
    """

    def __init__(
        self, model: LoadedModel, tokenizer: Tokenizer, workers: Workers, media: MediaPrompts
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self._media = media
        self._quick = model.template.with_limits(_QUICK)
        self._is_slow = False  # the last render was

    async def parse(self, messages: Messages) -> ParsedMessages:
        """Check messages. Raises InvalidRequestError: one is malformed."""
        if isinstance(messages, ParsedMessages):
            return messages
        return await self._workers.run(lambda _: parse_messages(messages), n_chars(messages))

    async def mark(
        self,
        messages: ParsedMessages,
        hold: Hold,
        *,
        marker: str | None = None,
        deadline: float = math.inf,
    ) -> MarkedMessages:
        """Read documents, and put markers in the place of media.

        Args:
            messages: in normal form.
            hold: counts what the images of documents take.
            marker: see `markers.mark`.
            deadline: when nobody waits for it any more.

        Raises:
            InvalidMediaError: a document cannot be read.
            UnsupportedFieldError: the model does not take one of the media.
            TrioServeError: from reading documents.
        """
        read = await self._media.read_documents(messages, hold, deadline)
        marked = await self._workers.run(lambda _: mark(read, marker), n_chars(read))
        check_kinds(self._model.modalities, marked.media.values())
        return marked

    async def load(self, messages: Messages, hold: Hold, deadline: float) -> ParsedMessages:
        """Check messages, and load their media, for a chat that becomes several prompts.

        Raises:
            TrioServeError: as `parse` and `mark`, and from loading.
        """
        return await self._media.load_once(await self.parse(messages), hold, deadline)

    def hold(self, owner: str = "") -> Hold:
        """Begin to count what the media of a request take."""
        return self._media.hold(owner)

    async def render(self, messages: Messages, chat: ChatParams) -> str:
        """Render messages without media; see `Server.render`."""
        self._workers.check_open()
        size = n_chars([messages, chat.tools, chat.template_kwargs])
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

    async def count_tokens(self, messages: Messages, chat: ChatParams) -> int:
        """See `Server.count_tokens`."""
        with self._media.hold() as hold:
            marked = await self.mark(await self.parse(messages), hold)
            text = await self.render(marked.messages, chat)
            add_special = self._adds_special(text)
            if not marked.media:
                tokens = await self._tokenizer.tokenize(text, add_special=add_special, aside=True)
                return len(tokens)
            parts = await self._workers.run(lambda _: marked.split(text), len(text))
            prompt = await self._media.prompt_of(
                parts, hold, add_special=add_special, fits=False, aside=True
            )
            return len(prompt)

    def _adds_special(self, text: str) -> bool:
        """Whether the tokenizer has to add BOS: most templates write it themselves."""
        bos = self._model.info.bos_token
        return not (bos and text.startswith(bos))

    async def prompt_of(
        self, text: str, marked: MarkedMessages, chat: ChatParams, hold: Hold, deadline: float
    ) -> Prompt:
        """Make a prompt of a rendered chat, with hints where a checkpoint is useful.

        Args:
            text: what the messages were rendered to.
            marked: the messages.
            chat: what they were rendered with.
            hold: counts what media take; it outlasts the prompt.
            deadline: when the request is cancelled.
        """
        add_special = self._adds_special(text)
        if marked.media:
            parts = await self._workers.run(lambda _: marked.split(text), len(text))
            prompt = await self._media.prompt_of(
                parts, hold, add_special=add_special, deadline=deadline
            )
        else:
            prompt = Prompt(
                await self._tokenizer.tokenize(text, add_special=add_special, fits=True)
            )
        if not self._model.keeps_checkpoints:
            return prompt
        find = partial(self._hints, text, prompt, marked, chat)
        hints = await self._workers.run_in_thread(find)
        return Prompt(prompt.tokens, media=prompt.media, hints=hints)

    def _hints(
        self, text: str, prompt: Prompt, marked: MarkedMessages, chat: ChatParams, stop: Stop
    ) -> tuple[int, ...]:
        messages = marked.messages
        n_given = len(messages) - (chat.continue_final_message is not None)
        partings = find_partings(
            self._model.template,
            text,
            messages[:n_given],
            tools=chat.tools,
            kwargs={**self._model.template_variables, **chat.template_kwargs},
        )
        return hints_of(
            self._model.vocab,
            marked.pieces(text),
            prompt,
            partings,
            stop,
            add_special=self._adds_special(text),
        )


def n_chars(value: Any) -> int:
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
