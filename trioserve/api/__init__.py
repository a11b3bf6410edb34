"""The HTTP routes: they turn JSON into calls of `Server`, and its answers into JSON and SSE.

`openai`, `anthropic`, `ollama`, `llama`, `vllm` and `cohere` each have the routes of one family of
APIs: handlers that answer a request with a reply, and `VENDOR`, which says what others need to know
of it (`base.vendors`). `base` is what they share. `edge` reads requests and sends replies; only it
knows Quart. `streams` has chats for an `EventSource`, `stored` what outlives a connection, `pages`
the files that the server serves, and `tools` what it runs for clients. `router` finds the
process of the model that a request names. `make_app` puts all of it into an app.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trioserve.api import (
    anthropic,
    cohere,
    llama,
    ollama,
    openai,
    openapi,
    pages,
    predict,
    sessions,
    stored,
    streams,
    vllm,
)
from trioserve.api.base import vendors
from trioserve.api.base.routes import Route
from trioserve.api.edge.app import App
from trioserve.api.openai import responses
from trioserve.api.openai.responses.request import StoringRequest
from trioserve.api.openai.spoken import SpokenChatRequest
from trioserve.api.service import AppState, Service
from trioserve.api.tools import proxy, routes as tools

if TYPE_CHECKING:
    from trioserve.config import Config

__all__ = ["App", "Service", "configure", "make_app"]


# The vendors whose APIs there are: a folder for each, with its entry. OpenAI's forms are those of
# all other paths, too.
vendors.register(
    openai.VENDOR,
    responses.VENDOR,
    anthropic.VENDOR,
    ollama.VENDOR,
    llama.VENDOR,
    vllm.VENDOR,
    cohere.VENDOR,
)


def make_app(state: AppState) -> App:
    """Make the app of a state: of one model, or of many."""
    app = App(state)
    state.settle, state.read_uploads = stored.settle, stored.read_uploads
    own = (openapi.routes, pages.routes, proxy.routes, tools.routes, stored.ROUTES, streams.routes)
    for routes in own:
        _add(app, state, routes)
    _add(app, state, vendors.known_routes())
    return app


def _add(app: App, state: AppState, routes: Iterable[Route]) -> None:
    for route in routes:
        answer = state.answer_of(route)
        if route.takes is not None and issubclass(route.takes, StoringRequest):
            answer = stored.stored(route, state, answer)
        if route.takes is SpokenChatRequest:
            answer = stored.stored_chats(state, answer)
        answer = state.patient(route, answer)
        if route.header:
            state.routes.append(route)
            app.serve(route, answer)
            continue
        asked = {}
        if route.method == "POST" and route.streams_by_default is not None:
            asked = dict.fromkeys(sessions.ASKED_BY, streams.resumable(route, state, answer))
        state.routes.append(route)
        state.answers[route.method, route.path] = answer
        app.serve(route, answer, asked)


def configure(app: App, config: Config) -> None:
    """Set what a configuration says of an app. To be done before requests come."""
    app.configure(config)
    _add(app, app.state, predict.routes_of(config, app.state.routes))
    if config.static_path is not None:
        app.otherwise = pages.static(config.static_path)
