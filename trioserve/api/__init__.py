"""The HTTP routes: they turn JSON into calls of `Server`, and its answers into JSON and SSE.

`openai`, `anthropic`, `ollama`, `llama`, `vllm` and `cohere` each have the routes of one family of
APIs: their handlers read the request, call the server and write the answer, and `VENDOR` says what
others need to know of it (`base.vendors`). `base` is what they share.
`streams` has chats for an `EventSource`, `stored` what outlives a connection, `pages` the files
that the server serves, and `tools` what it runs for clients. `install` puts all of it into an app
with one model. `router` forwards requests to the processes of many models, and `install_router`
puts it into an app, with the same routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quart import Blueprint
from quart.routing import QuartRule
from quart_trio import QuartTrio

from trioserve.api import (
    anthropic,
    cohere,
    llama,
    ollama,
    openai,
    openapi,
    pages,
    predict,
    stored,
    streams,
    vllm,
)
from trioserve.api.base import access, app_state, errors, http, tcp, vendors
from trioserve.api.base.connection import PREFIX, Connection, Request
from trioserve.api.base.service import Service
from trioserve.api.openai import responses
from trioserve.api.tools import proxy, routes as tools
from trioserve.config import Config

if TYPE_CHECKING:
    from trioserve.api.router.service import RouterService

__all__ = ["Service", "configure", "install", "install_router"]


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


def install(app: QuartTrio, served: Service) -> None:
    """Make an app serve the API with a service."""
    _install_base(app, served)
    for vendor in vendors.registered:
        _add(app, *vendor.routes_of_server, *vendor.routes)
    _add(app, streams.blueprint)


def install_router(app: QuartTrio, served: RouterService) -> None:
    """Make an app serve the API with the models of a router."""
    from trioserve.api import router
    from trioserve.api.router import routes as router_routes

    _install_base(app, served)
    router.install(app)
    _add(app, router_routes.blueprint)
    for vendor in vendors.registered:
        _add(app, *vendor.routes_of_router(), *vendor.routes)
    _add(app, streams.blueprint)


def _add(app: QuartTrio, *blueprints: Blueprint) -> None:
    for each in blueprints:
        app.register_blueprint(each)


class _Route(QuartRule):
    """A route that is found by its URL only. To build URLs from it, werkzeug would compile two
    functions for each route, which takes most of the time that an app takes to make.
    """

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        return _build_nothing


def _build_nothing(route: _Route, *_: object, **__: object) -> tuple[str, str]:
    raise NotImplementedError(f"{route.rule}: URLs are not built")


def _install_base(app: QuartTrio, served: app_state.AppState) -> None:
    app.url_rule_class = _Route
    app.asgi_http_class = Connection
    app.request_class = Request
    app.config["RESPONSE_TIMEOUT"] = None  # a stream lasts as long as it lasts
    # Stopping waits for the inference thread, which a long step can hold.
    app.config["BACKGROUND_TASK_SHUTDOWN_TIMEOUT"] = 60.0
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app_state.attach(app, served)
    tcp.install()
    before = (
        http.give_id,  # first: what follows may answer, and log
        access.answer_preflight,
        access.check_site,
        access.check_key,
        streams.take_over,  # after the checks: an answer that is posted for is read later
    )
    for each in before:
        app.before_request(each)
    for last_to_first in (
        http.show_id,
        app_state.count_answer,
        access.allow_origin,
        http.show_rate_limits,
    ):
        app.after_request(last_to_first)
    stored.install(app, served)  # which sees an answer before those do
    errors.install(app)
    _add(app, openapi.blueprint, pages.blueprint, proxy.blueprint, tools.blueprint)


def configure(app: QuartTrio, config: Config) -> None:
    """Set the limits that Quart and the connections keep. To be done before requests come."""
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_size
    app.config["BODY_TIMEOUT"] = None  # `body.py` counts the time
    app.config[PREFIX] = config.api_prefix
    predict.configure(app, config)
    if config.static_path is not None:
        app.before_request(pages.serve_static)  # after the check of keys
