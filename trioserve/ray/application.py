"""`build`: models as a Serve application."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.util import get_node_ip_address

from trioserve.errors import ConfigError
from trioserve.ray.calls import ModelTarget, Targets, replicas_of
from trioserve.ray.incoming import Sent
from trioserve.ray.ingress import Ingress
from trioserve.ray.lifelines import Anchor
from trioserve.ray.models import Model, Served, Settings, check_number, read_models
from trioserve.ray.prefix_affinity import RoutingHint
from trioserve.ray.replica import Replica
from trioserve.ray.routes import Routes

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
    known = [(one.name, one.aliases, one.deployment_name, _is_single(one)) for one in served]

    def make_app() -> Ingress:
        anchor = Anchor(get_node_ip_address())
        targets = [_target(each, anchor) for each in known]
        known_targets = Targets(config, targets, patience=patience)
        return Ingress(config, Routes(config, known_targets, finds_replicas=router), anchor)

    options = {
        "name": "ingress",
        "num_replicas": ingresses,
        "max_ongoing_requests": _MAX_OF_INGRESS,
        "health_check_period_s": _PERIOD,
        "graceful_shutdown_timeout_s": config.drain_timeout + _GRACE,
        "ray_actor_options": {"num_cpus": _CPUS_OF_INGRESS},
        **(ingress or {}),
    }
    return serve.deployment(serve.ingress(make_app)()).options(**options).bind(*deployments)


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
        # What the child cannot run waits there, where its order of turns counts.
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


def _target(known: tuple[str, tuple[str, ...], str, bool], anchor: Anchor) -> ModelTarget:
    """Make the target that an ingress calls a model's replicas with."""
    name, aliases, deployment, is_single = known
    handle = serve.get_deployment_handle(deployment).options(stream=True, method_name="forward")

    def call(sent: Sent, hint: RoutingHint) -> Any:
        return handle.remote(sent, hint, anchor.address)

    return ModelTarget(
        name=name,
        aliases=aliases,
        is_single=is_single,
        call=call,
        lost=(RayError, RayServeException),
        absent=(DeploymentUnavailableError,),
        replicas=partial(replicas_of, deployment),
    )


def _is_single(one: Served) -> bool:
    if one.autoscaling is None:
        return bool(one.deployment.get("num_replicas", one.replicas) == 1)
    return bool(one.autoscaling.get("max_replicas", 1) == 1)
