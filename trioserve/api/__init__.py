"""The HTTP routes: they turn JSON into calls of `Server`, and its answers into JSON and SSE.

`openai`, `anthropic`, `ollama` and `llama` each have the routes of one family of APIs: their
handlers read the request, call the server and write the answer. `base` is what they share.
`streams` has chats for an `EventSource`, `pages` the files that the server serves, and `tools` what
it runs for clients. `install` puts all of it into an app with one model. `router` forwards requests
to the processes of many models, and `install_router` puts it into an app, with the same routes.
"""

from __future__ import annotations

from collections.abc import Sequence

from quart import Blueprint
from quart_trio import QuartTrio

from trioserve.api import metrics, openapi, pages, predict, router, streams
from trioserve.api.anthropic import events as anthropic_errors, routes as anthropic
from trioserve.api.base import access, errors, http, intake, rate_limits, tcp
from trioserve.api.base.connection import (
    ANSWERING,
    MEMORY,
    PREFIX,
    SEND_TIMEOUT,
    Connection,
    Request,
)
from trioserve.api.base.service import Service
from trioserve.api.llama import admin, completion as llama, rerank, slots
from trioserve.api.ollama import (
    events as ollama_errors,
    models as ollama_models,
    routes as ollama,
)
from trioserve.api.openai import audio, chat as openai, embeddings, runs
from trioserve.api.openai.responses import events as responses_errors, routes as responses
from trioserve.api.router import ollama as router_ollama, routes as router_routes
from trioserve.api.router.service import RouterService
from trioserve.api.tools import proxy, routes as tools
from trioserve.config import Config

__all__ = ["ERROR_SHAPES", "RouterService", "Service", "configure", "install", "install_router"]


#: The forms of errors on the routes that do not have the common one.
ERROR_SHAPES = (anthropic_errors.SHAPE, responses_errors.SHAPE, ollama_errors.SHAPE)

#: Routes that speak of models by their names, and of what they do. A router forwards them.
_OF_MODELS: Sequence[Blueprint] = (
    openai.blueprint,
    audio.blueprint,
    runs.blueprint,
    responses.blueprint,
    anthropic.blueprint,
    ollama.blueprint,
    llama.blueprint,
    embeddings.blueprint,
    rerank.blueprint,
    slots.blueprint,
    streams.blueprint,
)


def install(app: QuartTrio, served: Service) -> None:
    """Make an app serve the API with a service."""
    _install_base(app, served)
    for blueprint in (admin.blueprint, ollama_models.blueprint, *_OF_MODELS):
        app.register_blueprint(blueprint)


def install_router(app: QuartTrio, served: RouterService) -> None:
    """Make an app serve the API with the models of a router."""
    _install_base(app, served)
    router.install(app)
    for blueprint in (router_routes.blueprint, router_ollama.blueprint, *_OF_MODELS):
        app.register_blueprint(blueprint)


def _install_base(app: QuartTrio, served: intake.Intake) -> None:
    app.asgi_http_class = Connection
    app.request_class = Request
    app.config["RESPONSE_TIMEOUT"] = None  # a stream lasts as long as it lasts
    # Stopping waits for the inference thread, which a long tick can hold.
    app.config["BACKGROUND_TASK_SHUTDOWN_TIMEOUT"] = 60.0
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    intake.attach(app, served)
    app.config[ANSWERING] = served.n_answering
    app.config[MEMORY] = lambda: served.memory
    tcp.install()
    http.install(app)  # first: what follows may answer, and log
    metrics.install(app)
    access.install_cors(app)
    access.install_sites(app)
    rate_limits.install(app)
    access.install_keys(app)
    errors.install(app, ERROR_SHAPES)
    streams.install(app)  # after the checks: an answer that is posted for is read later
    pages.install(app)
    for blueprint in (openapi.blueprint, pages.blueprint, proxy.blueprint, tools.blueprint):
        app.register_blueprint(blueprint)


def configure(app: QuartTrio, config: Config) -> None:
    """Set the limits that Quart and the connections keep. To be done before requests come."""
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_size
    app.config["BODY_TIMEOUT"] = config.timeout
    app.config[PREFIX] = config.api_prefix
    predict.configure(app, config)
    # The watch over unread tokens comes first; this is for clients that leave a response unread
    # whose request has ended.
    app.config[SEND_TIMEOUT] = 2 * config.stall_timeout
