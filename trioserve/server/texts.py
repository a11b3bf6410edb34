"""`ServerTexts`: parameters, tokens and rendered chats, for which nothing is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trioserve.chat.markers import media_marker
from trioserve.chat.params import ChatParams
from trioserve.server.context import generation_params, refuse, take_chat
from trioserve.server.life import ServerLife
from trioserve.server.prompts.chats import Messages
from trioserve.server.prompts.tokens import PromptLike
from trioserve.types import GenerationParams, Prompt, TokenId


class ServerTexts(ServerLife):
    """What a `Server` does with text without having its model generate anything."""

    async def params(
        self, fields: Mapping[str, Any], base: GenerationParams | None = None
    ) -> GenerationParams:
        """Make parameters from fields of `GenerationParams` and `SamplingParams`, by name.

        What is not set is as in `base`, or as the server's configuration says. A `logit_bias` may
        name text in place of a token id.

        Raises:
            InvalidRequestError: a field is unknown, has the wrong type or is out of range.
        """
        if fields.get("logit_bias") is not None:
            async with self.awake():
                biases = await self.parts.tokenizer.biases_of(fields["logit_bias"])
            fields = {**fields, "logit_bias": biases}
        return generation_params(base or (await self.known_model()).defaults, fields)

    async def tokenize(
        self,
        prompt: PromptLike,
        *,
        param: str = "prompt",
        add_special: bool = True,
        parse_special: bool = True,
    ) -> tuple[TokenId, ...]:
        """Turn text into token ids; see `Vocab.tokenize`. Ids in it stay as they are.

        Long text goes to a worker thread. Special tokens are added where it begins with text.

        Raises:
            InvalidRequestError: text cannot be encoded, or an id is not in the vocabulary; `param`
                names the field that it came from.
        """
        async with self.awake():
            made = await self.parts.tokenizer.prompt_of(
                prompt, add_special=add_special, parse_special=parse_special, aside=True
            )
        made.check(self.model.vocab.n_tokens, param)
        return made.tokens

    def detokenize(self, tokens: Sequence[TokenId]) -> str:
        """Turn token ids into text. Bytes that are no character become U+FFFD.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
            ServerSleepingError: the server sleeps; `awake` wakes it.
        """
        return self.parts.tokenizer.detokenize(tokens)

    def text_of(self, prompt: Prompt) -> str:
        """Write the prompt of an output as text, with ``[image]`` or the like for media.

        Raises:
            ServerSleepingError: the server sleeps; `awake` wakes it.
        """
        return self.parts.tokenizer.text_of(prompt)

    async def render(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> str:
        """Render a chat with the model's template. Media become markers: see `media_marker`.

        Raises:
            TemplateError: the template refuses the messages.
            UnsupportedFieldError: the model does not take one of the media.
            InvalidRequestError: a message is malformed.
        """
        chat = take_chat(fields, chat)
        refuse(fields)
        async with self.awake():
            prompts = self.parts.prompts
            with prompts.hold() as hold:
                parsed = await prompts.parse(messages)
                marked = await prompts.mark(parsed, hold, marker=media_marker())
            return await prompts.render(marked.messages, chat)

    async def count_tokens(
        self, messages: Messages, chat: ChatParams | None = None, **fields: Any
    ) -> int:
        """Count the tokens of a chat's prompt, with those of its media.

        Arguments and errors are those of `render`, and those of loading media.
        """
        chat = take_chat(fields, chat)
        refuse(fields)
        async with self.awake():
            return await self.parts.prompts.count_tokens(messages, chat)
