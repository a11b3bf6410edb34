"""Requests about an answer that another one began: only the child that gives it knows its id.

So the children are asked one after the other, unless the request names a model.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.connection import counted
from trioserve.api.base.registry import is_unknown
from trioserve.api.base.request import current_request
from trioserve.api.router import asked, forwarding
from trioserve.api.router.service import current_router
from trioserve.errors import ModelNotLoadedError, ModelProcessError, NotFoundError
from trioserve.models.catalog import ModelEntry
from trioserve.router.forward import exchange
from trioserve.router.states import Status


async def forward() -> Response:
    """Answer as the child does that knows the id, or else as the last one.

    Raises:
        NotFoundError: no model is loaded.
        TrioServeError: as `forwarding.forward`.
    """
    wanted = await asked.read()
    if wanted.model is not None:
        return await forwarding.forward_to_model(wanted)
    router, resources = current_router(), current_request().resources
    fleet = router.fleet
    resources.enter_context(counted(router.n_forwarded))
    response: Response | None = None
    for name, entry in list(fleet.catalog.entries.items()):
        if fleet.state(name).value is Status.LOADED:
            response = await _ask(entry, wanted.body) or response
            if response is not None and not await _is_unknown(response):
                break
    if response is None:
        raise NotFoundError("There is no such answer: no model is loaded.")
    return response


async def _ask(entry: ModelEntry, body: bytes) -> Response | None:
    """Ask one child; None when it has ended meanwhile."""
    async with AsyncExitStack() as stack:
        try:
            child = await stack.enter_async_context(
                current_router().fleet.use(entry, autoload=False)
            )
            answer = await stack.enter_async_context(
                exchange(child.socket_path, forwarding.outgoing(current_request(), body))
            )
            response = await forwarding.respond(answer)
        except (ModelNotLoadedError, ModelProcessError):
            return None
        if not answer.ended:  # it is the one: its stream lasts as long as the request
            await current_request().resources.enter_async_context(stack.pop_all())
        return response


async def _is_unknown(response: Response) -> bool:
    """Whether a child does not know the id."""
    if response.content_type != "application/json":
        return False
    return is_unknown(response.status_code, await response.get_data(as_text=False))
