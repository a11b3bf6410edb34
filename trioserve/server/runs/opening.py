"""Opens runs: checks what is asked, and has it done for as long as a block lasts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from trioserve.chat.params import ChatParams
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.server.common import Common
from trioserve.server.concurrency import alongside
from trioserve.server.model import LoadedModel
from trioserve.server.runs.calls import Calls
from trioserve.server.runs.events import RunEnded
from trioserve.server.runs.loop import Loop, Model, Question
from trioserve.server.runs.params import RunParams
from trioserve.server.runs.registry import Runs
from trioserve.server.runs.run import Run
from trioserve.server.runs.tools import RunTools


def check_chat(chat: ChatParams, config: Config, model: LoadedModel) -> None:
    """Refuse chats in which no tools can be run.

    Raises:
        InvalidRequestError: the answer is to continue a message, or calls are not taken out of it.
        UnsupportedFieldError: the server shows no tools to the model.
    """
    if chat.continue_final_message is not None:
        raise InvalidRequestError(
            "A message of the assistant cannot be continued where the server runs tools.",
            param="continue_final_message",
        )
    if not chat.parse_tools:
        raise InvalidRequestError(
            "'parse_tools' cannot be false where the server runs tools.", param="parse_tools"
        )
    if config.skip_chat_parsing:
        raise UnsupportedFieldError(
            "Tools cannot be run: this server runs with --skip-chat-parsing.", param="tools"
        )
    if not model.template.takes_tools:
        raise UnsupportedFieldError(
            "Tools need templates in Jinja, and this server runs with --no-jinja.", param="tools"
        )


@asynccontextmanager
async def open_run(
    model: Model, question: Question, tools: RunTools, params: RunParams, common: Common, runs: Runs
) -> AsyncIterator[Run]:
    """Have the model answer, and run what it calls, for as long as a block lasts.

    Args:
        model: answers.
        question: what is asked.
        tools: what may be called.
        params: what the run may do.
        common: of the server.
        runs: of the server.

    Raises:
        TrioServeError: the model cannot begin its first answer.
    """
    run = Run()
    calls = Calls(run, tools, params, question.context, common)
    loop = Loop(model, question, tools, calls, run)
    with runs.hold(run):
        async with alongside(partial(_do, loop, run)):
            await run.began.wait()
            run.feed.check_begun()
            yield run


def _alone(error: Exception) -> Exception:
    """Take an exception out of the groups that it is alone in."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return error


async def _do(loop: Loop, run: Run) -> None:
    with run.scope:
        try:
            answer = await loop.run()
        except Exception as error:
            run.feed.end(_alone(error))
        else:
            run.feed.put(RunEnded(run.feed.new_id(), answer))
            run.feed.end()
    if not run.feed.is_over:
        run.feed.end(run.error)
    run.began.set()
