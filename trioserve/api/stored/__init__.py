"""What outlives a connection: stored responses, conversations, files and batches, and usage.

The server that clients talk to stores them, with one model as with many. It changes requests
before their handlers or the process of their model get them, and reads the answers on their way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trioserve.api.stored import batches, conversations, files, responses, usage
from trioserve.api.stored.batches import ask_for_line
from trioserve.api.stored.runs import settle

if TYPE_CHECKING:
    from quart_trio import QuartTrio

    from trioserve.api.base.app_state import AppState

#: The routes, which a router does not forward either.
BLUEPRINTS = (
    batches.blueprint,
    conversations.blueprint,
    files.blueprint,
    responses.blueprint,
    usage.blueprint,
)


def install(app: QuartTrio, served: AppState) -> None:
    """Have an app store responses and run batches. To be done after the checks of keys."""
    app.before_request(responses.take_over)
    app.after_request(responses.keep)
    served.settle = settle
    served.batches.ask = partial(ask_for_line, app, served)
    app.url_map.converters["response"] = responses.ResponseId
    for each in BLUEPRINTS:
        app.register_blueprint(each)
