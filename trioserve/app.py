"""The ASGI app: ``hypercorn trioserve.app:app --worker-class trio``.

Importing this loads no model and reads no environment; both happen when the app is served. The
socket is open while the model loads, and requests are answered with 503 until it is there.
"""

from __future__ import annotations

import os
from functools import partial

import structlog
from hypercorn.utils import LifespanFailureError
from quart_trio import QuartTrio

from trioserve import api
from trioserve.api.base.app_state import AppState
from trioserve.api.base.service import Service
from trioserve.api.router.service import OpenFleet, RouterService
from trioserve.config import Config, logs
from trioserve.config.parse import from_environment
from trioserve.errors import ConfigError, TrioServeError
from trioserve.server.lifecycle.engine import Loader

_log = structlog.stdlib.get_logger("trioserve")


def create_app(config: Config | None = None, *, load: Loader | None = None) -> QuartTrio:
    """Make an app that serves one model.

    The app's `Service` is ``app.extensions["trioserve"]``.

    Args:
        config: what to serve; none: as the environment says when the app is served, and then
            the app sets up logging too.
        load: loads the model; the default loads a GGUF file with llama.cpp.
    """
    service = Service(config, load=load)
    app = _app_of(service)
    api.install(app, service)

    async def begin() -> None:
        if config is None:
            service.config = from_environment(os.environ)
            logs.configure(service.config)
        await _begin(app, service)

    app.before_serving(begin)
    return app


def create_router(config: Config, open_fleet: OpenFleet) -> QuartTrio:
    """Make an app that serves many models, each in a process of its own.

    The app's `RouterService` is ``app.extensions["trioserve"]``.

    Args:
        config: what the router itself serves.
        open_fleet: opens the models when the app is served.
    """
    service = RouterService(config, open_fleet)
    app = _app_of(service)
    api.install_router(app, service)
    app.before_serving(partial(_begin, app, service))
    return app


def _app_of(service: AppState) -> QuartTrio:
    app = QuartTrio("trioserve", static_folder=None)
    app.after_serving(service.stop)
    return app


async def _begin(app: QuartTrio, service: AppState) -> None:
    try:
        api.configure(app, service.config)
    except ConfigError as error:
        _log.error(error.message)
        raise LifespanFailureError("startup", error.message) from None
    app.nursery.start_soon(_live, service)


async def _live(service: AppState) -> None:
    """Run the service. When it fails, end the process that serves it.

    Hypercorn goes on without an app's lifespan when that raises, except for this one error,
    which ends the worker, and with it the command.
    """
    try:
        await service.run()
    except TrioServeError as error:
        raise LifespanFailureError("serving", error.message) from None
    except Exception as error:
        # A mistake of ours. Answering 503 for ever would hide it.
        _log.exception("the server broke")
        raise LifespanFailureError("serving", repr(error)) from error


app = create_app()
