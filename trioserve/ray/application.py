"""`build`: models as a Serve application."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextvars import Context
from functools import partial
from typing import Any

import attrs
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from trioserve.api import App
from trioserve.app import app_of
from trioserve.config import logs
from trioserve.errors import ConfigError
from trioserve.ray.guest import Guest
from trioserve.ray.ingress import Ingress, Message, Peers
from trioserve.ray.models import Model, Served, Settings, check_number, read_models
from trioserve.ray.prefix_affinity import RoutingHint
from trioserve.ray.replica import Replica
from trioserve.ray.replicas import ModelTarget, Replicas, replicas_of
from trioserve.ray.service import RayState

#: Seconds between two questions of Serve whether a replica lives, and how full it is.
_PERIOD = 2.0

#: Seconds that a replica gets to shut down, besides the time for its requests to finish.
_GRACE = 10.0

#: Requests besides those that generate: lists, health and metrics.
_OTHERS = 64

#: Requests that one ingress may have at the same time. Each waits, most of the time.
_MAX_OF_INGRESS = 2000

#: Cores that Ray counts for an ingress. With a whole one, small machines had none left for models.
_CPUS_OF_INGRESS = 0.1

#: The exceptions when who was called is lost.
_LOST = (RayError, RayServeException)

_INGRESS = "ingress"

_ROUTER = "trioserve.ray.request_router.PrefixRouter"


def build(
    models: Mapping[str, Model | Settings],
    *,
    settings: Settings = (),
    replicas: int = 1,
    autoscaling: Mapping[str, Any] | None = None,
    ingresses: int = 2,
    router: bool = True,
    patience: float = 30.0,
    ingress: Mapping[str, Any] | None = None,
) -> serve.Application:
    """Make a Serve application: ``serve.run(build({"qwen": ["-m", "/models/qwen.gguf"]}))``.

    The environment variables of the command count as they do for it, where they are set for the
    process that calls this.

    Args:
        models: by name: a `Config`, the flags of the command, a mapping of flags without their
            dashes, or a `Model`.
        settings: the same, for all models. Those of a model win.
        replicas: how many servers each model gets that sets no number.
        autoscaling: fields of Serve's `AutoscalingConfig`, in place of a number of replicas. As
            many ongoing requests as there are slots are aimed at, unless it says otherwise.
        ingresses: how many processes look at requests. With one, a lost node is a lost service.
        router: send requests that begin alike to the same replica, which has that in its cache.
            Otherwise, Serve's own router takes the emptier of two replicas.
        patience: seconds that a request waits for a replica to take it, before it gets a 503.
        ingress: further options of the ingress's deployment.

    Raises:
        ConfigError: a value cannot be used; the message names it.
    """
    check_number("ingresses", ingresses)
    check_number("replicas", replicas)
    if not patience > 0:
        raise ConfigError(f"patience must be more than 0 seconds, not {patience}")
    served = read_models(models, settings, os.environ, replicas=replicas, autoscaling=autoscaling)
    deployments = [_deployment(one, router=router).bind(one.config) for one in served]
    config = served[0].config
    known = [
        attrs.evolve(one, deployment={}, autoscaling=None, is_single=_is_single(one))
        for one in served
    ]

    def make_app() -> Ingress:
        name = str(serve.get_replica_context().replica_id.unique_id)

        def make(guest: Guest) -> App:
            logs.configure(config)
            replicas = Replicas(guest, name, [*map(_target, known)], patience=patience)
            state = RayState(config, replicas)
            state.streams.owner = f"{name}."
            app = app_of(state)
            app.before_serving(state.wait_loaded)
            return app

        is_single = ingresses == 1 and not ingress
        peers = _peers(name) if router and not is_single else None
        return Ingress(make, peers, config.max_body_size, is_single=is_single)

    options = {
        "name": _INGRESS,
        "num_replicas": ingresses,
        "max_ongoing_requests": _MAX_OF_INGRESS,
        "health_check_period_s": _PERIOD,
        "graceful_shutdown_timeout_s": config.drain_timeout + _GRACE,
        "ray_actor_options": {"num_cpus": _CPUS_OF_INGRESS},
        "request_router_config": RequestRouterConfig(
            **{"request_router_class": _ROUTER} if router else {}
        ),
        **(ingress or {}),
    }
    return serve.deployment(serve.ingress(make_app)(_Ingress)).options(**options).bind(*deployments)


class _Ingress:
    """The methods that ingresses call of each other."""

    def __init__(self, *models: object) -> None:
        """Serve deploys the models first, which it finds here."""

    async def greet(self) -> None:
        """Do nothing: Serve has found the ingresses then."""

    async def here(
        self, scope: Message, body: bytes, hint: RoutingHint
    ) -> AsyncGenerator[Message, None]:
        """Answer a request that another one has got."""
        async for message in self.app.here(scope, body):  # type: ignore[attr-defined]  # Serve's
            yield message


def app(args: Mapping[str, Any]) -> serve.Application:
    """Make an application of the arguments of `build`, as a file for ``serve deploy`` has them.

    Raises:
        ConfigError: as `build`; or an argument is unknown or missing.
    """
    known = set(build.__kwdefaults__ or ()) | {"models"}
    if unknown := sorted(set(args) - known):
        raise ConfigError(f"{unknown[0]!r} is not an argument; they are {', '.join(sorted(known))}")
    if not isinstance(args.get("models"), Mapping):
        raise ConfigError("models must be a mapping from names to flags and their values")
    return build(**args)


def _deployment(one: Served, *, router: bool) -> Any:
    """Make the deployment of a model."""
    config = one.config
    routing: dict[str, Any] = {"request_routing_stats_period_s": _PERIOD}
    if router:
        routing["request_router_class"] = _ROUTER
    options: dict[str, Any] = {
        "name": one.deployment_name,
        # Requests that cannot run yet wait in the child, where its order of turns counts.
        "max_ongoing_requests": config.parallel + config.max_queue + _OTHERS,
        "health_check_period_s": _PERIOD,
        "graceful_shutdown_timeout_s": config.drain_timeout + _GRACE,
        "request_router_config": RequestRouterConfig(**routing),
    }
    if one.autoscaling is None:
        options["num_replicas"] = one.replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            **{"target_ongoing_requests": config.parallel, **one.autoscaling}
        )
    try:
        return serve.deployment(Replica).options(**{**options, **one.deployment})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{one.name}: {error}") from error


def _target(one: Served) -> ModelTarget:
    """Make the target that an ingress takes leases of."""
    handle = serve.get_deployment_handle(one.deployment_name)
    return ModelTarget(
        name=one.name,
        aliases=one.aliases,
        config=one.config,
        is_single=one.is_single,
        call=handle.options(stream=True, method_name="lease").remote,
        lost=_LOST,
        absent=(DeploymentUnavailableError,),
        replicas=partial(replicas_of, one.deployment_name),
    )


def _peers(name: str) -> Peers:
    """Make what an ingress of this name asks the others with."""
    handle = serve.get_deployment_handle(_INGRESS)
    here = handle.options(stream=True, method_name="here").remote

    # Each call has a new context: Serve identifies it by the request there.

    async def names() -> list[str]:
        if not replicas_of(_INGRESS):  # nothing was asked of any yet
            await Context().run(handle.options(method_name="greet").remote)
        return replicas_of(_INGRESS)

    async def call(scope: Message, body: bytes, name: str) -> AsyncGenerator[Message, None]:
        response = Context().run(here, scope, body, RoutingHint(key=name))
        try:
            async for message in response:
                yield message
        finally:
            response.cancel()

    return Peers(name=name, names=names, call=call, lost=_LOST)


def _is_single(one: Served) -> bool:
    """True if a model never has more than one replica."""
    if one.autoscaling is None:
        return bool(one.deployment.get("num_replicas", one.replicas) == 1)
    return bool(one.autoscaling.get("max_replicas", 1) == 1)
