"""The ASGI app: ``hypercorn trioserve.app:app --worker-class trio``.

Importing this loads no model and reads no environment; both happen when the app is served. The
socket is open while the model loads; requests get 503 until then.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from hypercorn.utils import LifespanFailureError

from trioserve import api
from trioserve.api.edge.app import App
from trioserve.api.service import AppState, Service
from trioserve.config import Config, logs
from trioserve.config.parse import from_environment
from trioserve.errors import ConfigError, TrioServeError
from trioserve.log import get_logger
from trioserve.server.keys import Keys
from trioserve.server.lifecycle.engine import Loader

if TYPE_CHECKING:
    from trioserve.api.router.service import OpenFleet

_log = get_logger("trioserve")


def create_app(config: Config | None = None, *, load: Loader | None = None) -> App:
    """Make an app that serves one model.

    The app's `Service` is ``app.extensions["trioserve"]``.

    Args:
        config: what to serve. Without it, the app reads the environment when it is served, and
            then also sets up logging.
        load: loads the model; the default loads a GGUF file with llama.cpp.
    """
    service = Service(config, load=load)
    app = api.make_app(service)

    async def begin() -> None:
        if config is None:
            service.config = from_environment(os.environ)
            logs.configure(service.config)
        await _begin(app, service)

    app.before_serving(begin)
    return app


def create_router(config: Config, open_fleet: OpenFleet) -> App:
    """Make an app that serves many models, each in a separate process.

    The app's `RouterService` is ``app.extensions["trioserve"]``.

    Args:
        config: what the router itself serves.
        open_fleet: opens the models when the app is served.
    """
    from trioserve.api.router.service import RouterService

    return app_of(RouterService(config, open_fleet))


def app_of(service: AppState) -> App:
    """Make the app of a state, which begins when the app is served."""
    app = api.make_app(service)
    app.before_serving(partial(_begin, app, service))
    return app


async def _begin(app: App, service: AppState) -> None:
    try:
        service.keys = Keys(service.config)
        await service.keys.open()
        api.configure(app, service.config)
    except ConfigError as error:
        _log.error(error.message)
        raise LifespanFailureError("startup", error.message) from None
    app.nursery.start_soon(_live, service)


async def _live(service: AppState) -> None:
    """Run the service. If it fails, end the process that serves it.

    When the lifespan of an app raises, Hypercorn continues without it, except for
    `LifespanFailureError`, which ends the worker and with it the command.
    """
    try:
        await service.run()
    except TrioServeError as error:
        raise LifespanFailureError("serving", error.message) from None
    except Exception as error:
        # A bug in trioserve. Answering 503 forever would hide it.
        _log.exception("the server broke")
        raise LifespanFailureError("serving", repr(error)) from error


app = create_app()
