"""The metrics of a router, in one text with those of the models that are loaded."""

from __future__ import annotations

import re
from collections import Counter as Count, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import trio
from prometheus_client import Metric

from trioserve.errors import TrioServeError
from trioserve.model_process.connection import Line, ask
from trioserve.router.fleet import Fleet
from trioserve.router.states import ModelState, Status
from trioserve.server.observers.metrics import gauge, prometheus_text, total
from trioserve.server.observers.observer import Event, ToolRecord

_T = TypeVar("_T")
_P = ParamSpec("_P")


class RouterMetrics:
    """Counts requests. The models' metrics are read on demand."""

    def __init__(self) -> None:
        self._answered: Count[tuple[str, str]] = Count()  # by model and status
        self._tool_calls: Count[tuple[str, str]] = Count()  # by tool and outcome

    def answered(self, model: str, status: int) -> None:
        """Count a request by the status that its client gets."""
        self._answered[model, str(status)] += 1

    def on_event(self, event: Event) -> None:
        """Count a call of a tool."""
        if isinstance(event, ToolRecord):
            self._tool_calls[event.tool, event.outcome] += 1

    def render(self, states: Mapping[str, ModelState]) -> bytes:
        """Return all metrics, and those of models, in Prometheus' text format."""
        return prometheus_text(self._families(states))

    def _families(self, states: Mapping[str, ModelState]) -> Iterator[Metric]:
        text = "Requests that a model has answered, or could not"
        yield total("router_requests", text, self._answered, "model", "status")
        text = "Calls of the router's own tools"
        yield total("router_tool_calls", text, self._tool_calls, "tool", "outcome")
        by_status = Count(state.value for state in states.values())
        models = {(status.value,): by_status[status] for status in Status}
        yield gauge("router_models", "Models, by what they do", models, "status")
        running = {(name,): state.n_requests for name, state in states.items()}
        yield gauge("router_requests_running", "Requests with a model", running, "model")
        waiting = {(name,): state.n_waiting for name, state in states.items()}
        yield gauge("router_requests_waiting", "Requests that wait for a model", waiting, "model")


#: The router has these for all models.
_OF_THE_ROUTER = ("trioserve:http_", "trioserve:stream", "trioserve:usage_")

_MODEL_NAME = re.compile(r'\bmodel_name="(?:[^"\\]|\\.)*"')


async def of_models(
    fleet: Fleet,
    patience: float,
    method: Callable[Concatenate[Any, _P], Awaitable[_T]],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> dict[str, _T]:
    """Call a method of each model that is loaded; gives what they answer.

    None is loaded for this, or kept from being unloaded. One that does not answer well within
    `patience` seconds is left out.
    """
    found: dict[str, _T] = {}

    async def ask_one(name: str, line: Line) -> None:
        with suppress(TrioServeError), trio.move_on_after(patience):
            found[name] = await ask(line, method, *args, **kwargs)

    async with trio.open_nursery() as nursery:
        for name, child in fleet.loaded().items():
            nursery.start_soon(ask_one, name, child.line)
    return dict(sorted(found.items()))


def joined(own: bytes, models: Mapping[str, str]) -> str:
    """Write metrics as one text, each with its help and type once.

    Args:
        own: those of the router.
        models: those of each model, which get its name as their label `model_name`.
    """
    labelled = [(label("model_name", name), text) for name, text in models.items()]
    return merged([("", own.decode()), *labelled], without=_OF_THE_ROUTER)


def merged(texts: Iterable[tuple[str, str]], *, without: tuple[str, ...] = ()) -> str:
    """Write metrics as one text, each with its help and type once.

    Args:
        texts: of each source its labels, which its samples get, and its metrics.
        without: beginnings of names that are left out where there are labels.
    """
    heads: dict[str, dict[str, str]] = {}  # of each metric: its comments, by their kind
    samples: defaultdict[str, list[str]] = defaultdict(list)
    name, is_left_out = "", False
    for labels, line in ((labels, line) for labels, text in texts for line in text.splitlines()):
        if line.startswith("#"):
            _, kind, name, *_ = line.split(" ", 3)
            is_left_out = bool(labels) and name.startswith(without)
            if not is_left_out:
                heads.setdefault(name, {}).setdefault(kind, line)
        elif not is_left_out:
            samples[name].append(_labelled(line, labels))
    return "".join(
        f"{line}\n" for name, head in heads.items() for line in (*head.values(), *samples[name])
    )


def label(name: str, value: str) -> str:
    """Write a label as a sample has it."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'


def _labelled(sample: str, labels: str) -> str:
    """Add labels, in the place of that of the model."""
    if not labels:
        return sample
    named, n = _MODEL_NAME.subn(lambda _: labels, sample, count=1)
    if n:
        return named
    name, brace, others = sample.partition("{")
    return f"{name}{{{labels},{others}" if brace else sample.replace(" ", f"{{{labels}}} ", 1)
