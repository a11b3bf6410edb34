"""Fuzz a served API for some minutes: ``make fuzz``, or ``python -m tests.fuzz [seconds [flags]]``.

With ``--models-dir FOLDER``, it is a router's, and bodies name its first model now and then.

Serves the bundled model in a process of its own and sends two kinds of requests:

1. Bytes: requests in HTTP/1.1 and HTTP/2 with bytes changed, doubled or left out, cut anywhere.
2. Bodies: what Schemathesis draws from ``/openapi.json``, bodies that fit the description, and
   bodies that do not.

It fails on an answer that says that the server broke, on one that does not come in time, on a
server that no longer answers, and on a slot that is still in use when all is over.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import requests
import schemathesis
import trio
from hypothesis import HealthCheck, Phase, Verbosity, given, settings, strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

from tests.support.attacks import send_all_mutated
from tests.support.scripts import BASE

#: Flags that switch on what can be switched on, and keep outputs short.
FLAGS = ["--port", "0", "-t", "1", "-c", "1024", "-np", "2", "-n", "32", "--metrics", "--props"]

#: Seconds in which every answer must come: a prompt is short, and an output ends with the context.
TIMEOUT = 30.0

#: Statuses above 500 that are no fault: what is not supported, and a server that is full.
FINE = {501, 503, 504}

EXAMPLES = 15

#: Requests of mutated bytes.
N_MUTATED = 2000


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Run the command with some more flags; gives its URL."""
    with tempfile.TemporaryDirectory() as saved:
        command = [sys.executable, "-m", "trioserve", *FLAGS, "--slot-save-path", saved, *flags]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            with tempfile.TemporaryFile("w+") as log:
                url = ""
                for line in process.stderr:
                    said = json.loads(line)
                    if said["event"] == "listening":
                        url = said["url"]
                    if said["event"] == "ready":
                        break
                drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=log)
                try:
                    yield url
                finally:
                    process.terminate()
                    process.wait(30)
                    drain.wait(10)
                    log.seek(0)
                    sys.stderr.writelines(line for line in log if '"level": "error"' in line)


def is_loaded(model: dict[str, Any]) -> bool:
    """Whether a model of `/v1/models` has a process. A server with one model does not say."""
    return model.get("status", {}).get("value", "loaded") == "loaded"


def check(
    operation: Any, mode: GenerationMode, url: str, model: str, statuses: Counter[int]
) -> None:
    """Send some requests to one route, and count the answers. Raises AssertionError."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        verbosity=Verbosity.quiet,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(case=operation.as_strategy(generation_mode=mode), complete=st.booleans())
    def send(case: Any, complete: bool) -> None:
        if complete and isinstance(case.body, dict):
            # To get further than to what is missing.
            case.body = {**BASE, **case.body, "model": model}
        try:
            answer = case.call(base_url=url, timeout=TIMEOUT)
        except requests.Timeout:
            raise AssertionError(f"no answer in time:\n{case.as_curl_command()}") from None
        statuses[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code not in FINE:
            raise AssertionError(f"{answer.status_code}\n{case.as_curl_command()}\n{answer.text}")

    with suppress(Unsatisfiable):  # there may be nothing that does not fit
        send()


def modes_of(operation: Any) -> list[GenerationMode]:
    """Whether a request can be wrong: one without a body and parameters cannot."""
    if operation.body or operation.query or operation.path_parameters:
        return list(GenerationMode)
    return [GenerationMode.POSITIVE]


def slots_in_use(url: str) -> int:
    """How many slots have a task, of all models that are loaded."""
    listed = requests.get(f"{url}/v1/models", timeout=TIMEOUT).json()["data"]
    answers = [
        requests.get(f"{url}/slots", {"model": one["id"]}, timeout=TIMEOUT).json()
        for one in listed
        if is_loaded(one)
    ]
    return sum(slot["is_processing"] for slots in answers for slot in slots)


def send_bytes(url: str, statuses: Counter[int]) -> list[str]:
    """Send requests of mutated bytes, and count the answers. Returns what is wrong."""
    first = random.randrange(2**32)
    seeds = f"{N_MUTATED} mutated requests, seeds from {first}"
    try:
        found = trio.run(send_all_mutated, url, range(first, first + N_MUTATED))
        answer = requests.get(f"{url}/health", timeout=TIMEOUT)
    except (OSError, ExceptionGroup) as error:  # requests' own errors are OSErrors
        return [f"{seeds}: the server does not answer any more: {error!r}"]
    statuses += found
    found[answer.status_code] += 1
    return [f"{seeds}: status {status}" for status in found if status >= 500 and status not in FINE]


def main(seconds: float, *flags: str) -> int:
    """Fuzz for so long. Returns the exit code."""
    statuses: Counter[int] = Counter()
    with serving(*flags) as url:
        faults = send_bytes(url, statuses)
        until = time.monotonic() + seconds
        described = requests.get(f"{url}/openapi.json", timeout=TIMEOUT).json()
        schema = schemathesis.openapi.from_dict(described)
        operations = [found.ok() for found in schema.get_all_operations()]
        model = requests.get(f"{url}/v1/models", timeout=TIMEOUT).json()["data"][0]["id"]
        while time.monotonic() < until and not faults:
            for operation in operations:
                for mode in modes_of(operation):
                    if time.monotonic() < until:
                        try:
                            check(operation, mode, url, model, statuses)
                        except AssertionError as error:
                            faults.append(f"{operation.label}: {error}")
        until = time.monotonic() + TIMEOUT  # streams that can be resumed come to their end
        while (n := slots_in_use(url)) and time.monotonic() < until:
            time.sleep(1)
        if n:
            faults.append(f"{n} slots are still in use")
    counts = ", ".join(f"{n} with status {status}" for status, n in sorted(statuses.items()))
    print(f"{statuses.total()} answers ({counts}) in {seconds:g} seconds, {len(faults)} faults")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(float((sys.argv[1:] or ["300"])[0]), *sys.argv[2:]))
