"""``POST /infill``, and the prompt of a text with a gap.

::

    repository  its name
    file        name and text of an extra file       (for each)
    file        name of the file with the gap
    prefix      the text before the gap, and how the gap begins
    suffix      the text after the gap
    middle      (the model goes on here)

The repository and the names of files are there when the vocabulary has tokens for them. Names,
and what is left out of a text that is too long, are as in llama-server.
"""

from __future__ import annotations

import attrs
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body
from trioserve.api.base.generation import options_for, tokens_for
from trioserve.api.base.openapi import takes
from trioserve.api.base.prompts import jobs_for
from trioserve.api.base.readers import RawPrompt
from trioserve.api.base.service import current_server
from trioserve.api.base.terms import terms_of
from trioserve.api.llama.completion import answer
from trioserve.api.llama.request import File, InfillRequest
from trioserve.errors import NotSupportedError
from trioserve.server import Server
from trioserve.types import GenerationParams, Prompt, TokenId

blueprint = Blueprint("infill", __name__)

_REPOSITORY = "myproject\n"
_FILE = "filename\n"
#: Stands before an extra file when the vocabulary has no token for that.
_SNIPPET = "\n\n--- snippet ---\n\n"


@attrs.frozen(kw_only=True)
class Gap:
    """A text with a gap. `begun` is what the gap begins with."""

    prefix: RawPrompt
    suffix: RawPrompt
    extra: tuple[File, ...] = ()
    begun: str = ""


@blueprint.post("/infill")
@takes(InfillRequest)
async def fill() -> Response:
    """Fill the gap between two texts."""
    server = current_server()
    if what := missing(server):
        raise NotSupportedError(f"Infill is not supported by this model: {what}.")
    wanted = InfillRequest.parse(await read_body())
    options, terms = await options_for(server, wanted), terms_of(wanted)
    gap = Gap(
        prefix=wanted.input_prefix,
        suffix=wanted.input_suffix,
        extra=wanted.input_extra,
        begun=wanted.prompt,
    )
    prompt = await prompt_for(server, gap, options)
    jobs = await jobs_for(server, [prompt], options, wanted.n_copies)
    return await answer(server, wanted, jobs, terms)


def missing(server: Server) -> str:
    """Say which tokens for gaps the vocabulary lacks; empty: none."""
    fim = server.vocab.fim
    tokens = {"prefix": fim.prefix, "suffix": fim.suffix, "middle": fim.middle}
    return ". ".join(f"{name} token is missing" for name, token in tokens.items() if token < 0)


async def prompt_for(server: Server, gap: Gap, options: GenerationParams) -> tuple[TokenId, ...]:
    """Make the prompt that asks to fill a gap.

    Three quarters of a batch are for the text before the gap, and a quarter for what follows it:
    of longer ones, what is nearest to the gap is kept. Extra files get what the context has left.

    Raises:
        InvalidRequestError: the texts cannot be tokenized; `param` names the field.
    """
    fim, info = server.vocab.fim, server.info
    prefix = await _tokens(server, gap.prefix, "input_prefix")
    suffix = await _tokens(server, gap.suffix, "input_suffix")
    begun = await server.tokenize(gap.begun, add_special=False)
    extra = await _extra(server, gap.extra)

    # A context that is hardly larger than a batch needs room for the output.
    room = min(server.config.batch_size, server.n_ctx_seq * 3 // 4)
    n_prefix = room // 4 * 3
    n_suffix = max(0, room // 4 - 2 - len(begun))
    n_extra = max(0, server.n_ctx_seq - room - 2 * max(options.max_tokens, 0))

    before = (fim.prefix, *prefix[-n_prefix:], *begun)
    after = (fim.suffix, *suffix[:n_suffix])
    bos = (server.vocab.bos,) if info.add_bos else ()
    parts = (after, before) if server.config.spm_infill else (before, after)
    return (*extra[max(0, len(extra) - n_extra) :], *bos, *parts[0], *parts[1], fim.middle)


async def _tokens(server: Server, text: RawPrompt, param: str) -> tuple[TokenId, ...]:
    tokens = await tokens_for(server, text, add_special=False, parse_special=False)
    Prompt(tokens).check(server.vocab.n_tokens, param)
    return tokens


async def _extra(server: Server, files: tuple[File, ...]) -> list[TokenId]:
    fim = server.vocab.fim
    tokens: list[TokenId] = []
    if fim.repository >= 0:
        tokens += (fim.repository, *await _tokens(server, _REPOSITORY, "input_extra"))
    for file in files:
        if fim.file >= 0:
            tokens += (fim.file, *await _tokens(server, f"{file.name}\n", "input_extra"))
        else:
            tokens += await _tokens(server, _SNIPPET, "input_extra")
        tokens += await _tokens(server, file.text, "input_extra")
    if fim.file >= 0:
        tokens += (fim.file, *await _tokens(server, _FILE, "input_extra"))
    return tokens
