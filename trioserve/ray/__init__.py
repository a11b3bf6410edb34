"""Models on many machines: trioserve as a Ray Serve application. It needs ``trioserve[ray]``.

`build` makes the application. An `ingress` is the app that there is elsewhere, whose state is in
`service`; Trio runs in it as a `guest` of Ray's event loop. `replicas` lends it the processes of
models: `request_router` chooses the `replica`, by what `prefix_affinity` knows of the beginning of
the prompt. Only `application` and `request_router` import Ray.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.ray.application import app, build
    from trioserve.ray.models import Model

__all__ = ["Model", "app", "build"]


def __getattr__(name: str) -> Any:
    # The modules that need Ray are imported by who needs them.
    if name == "Model":
        from trioserve.ray.models import Model

        return Model
    if name in __all__:
        from trioserve.ray import application

        return getattr(application, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
