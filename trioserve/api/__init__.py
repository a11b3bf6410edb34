"""The HTTP routes: they turn JSON into calls of `Server`, and its answers into JSON and SSE.

`openai`, `anthropic`, `ollama` and `llama` each have the routes of one family of APIs: their
handlers read the request, call the server and write the answer. `base` is what they share.
`streams` has chats for an `EventSource`, and `pages` the files that the server serves. `install`
puts all of it into an app.
"""

from __future__ import annotations

from quart_trio import QuartTrio

from trioserve.api import pages, predict
from trioserve.api.anthropic import errors as anthropic_errors, routes as anthropic
from trioserve.api.base import (
    auth,
    cors,
    errors,
    intake,
    openapi,
    rate_limits,
    request,
    sites,
    tcp,
)
from trioserve.api.base.connection import (
    ANSWERING,
    MEMORY,
    PREFIX,
    SEND_TIMEOUT,
    Connection,
    Request,
)
from trioserve.api.base.service import Service
from trioserve.api.llama import (
    admin,
    completion as llama,
    control,
    infill,
    lora,
    metrics,
    rerank,
    slots,
)
from trioserve.api.ollama import (
    embed as ollama_embeddings,
    errors as ollama_errors,
    models as ollama_models,
    routes as ollama,
)
from trioserve.api.openai import chat as openai, embeddings
from trioserve.api.openai.responses import errors as responses_errors, routes as responses
from trioserve.api.streams import routes as streams
from trioserve.config import Config

__all__ = ["Service", "configure", "install"]


def install(app: QuartTrio, served: Service) -> None:
    """Make an app serve the API with a service."""
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
    request.install(app)  # first: what follows may answer, and log
    cors.install(app)
    sites.install(app)
    rate_limits.install(app)
    auth.install(app)
    errors.install(app, [anthropic_errors.SHAPE, responses_errors.SHAPE, ollama_errors.SHAPE])
    pages.install(app)
    for module in (
        admin,
        openai,
        control,
        responses,
        anthropic,
        ollama,
        ollama_embeddings,
        ollama_models,
        llama,
        infill,
        embeddings,
        rerank,
        slots,
        lora,
        metrics,
        streams,
        openapi,
        pages,
    ):
        app.register_blueprint(module.blueprint)


def configure(app: QuartTrio, config: Config) -> None:
    """Set the limits that Quart and the connections keep. To be done before requests come."""
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_size
    app.config["BODY_TIMEOUT"] = config.timeout
    app.config[PREFIX] = config.api_prefix
    predict.configure(app, config)
    # The watch over unread tokens comes first; this is for clients that leave a response unread
    # whose request has ended.
    app.config[SEND_TIMEOUT] = 2 * config.stall_timeout
