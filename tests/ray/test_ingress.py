"""An ingress, with replicas that are servers in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.server.test_keys import table
from tests.support.event_source import text_in
from tests.support.ray_replicas import AbsentError, LostError, Received, Replicas, ask, ingress_of
from tests.support.scripts import answering, endless
from trioserve.config import Config
from trioserve.ray import replicas as module, service
from trioserve.ray.ingress import Ingress, Peers

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "a", "messages": HI}
PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    monkeypatch.setattr(service, "_LIST_PATIENCE", 0.5)


def with_ingress(
    models: dict[str, Replicas],
    use: Callable[[Ingress], Awaitable[Any]],
    config: Config | None = None,
    **options: Any,
) -> Any:
    """Use an ingress of these models on asyncio's event loop, and return what comes of it."""

    async def main() -> Any:
        async with asyncio.timeout(20), ingress_of(models, config, **options) as ingress:
            return await use(ingress)

    return asyncio.run(main())


def asked(
    models: dict[str, Replicas], *args: Any, config: Config | None = None, **options: Any
) -> Received:
    """Send one request, and return the answer."""
    own = {name: options.pop(name) for name in ("root_path", "comes") if name in options}

    async def use(ingress: Ingress) -> Received:
        return await ask(ingress, *args, **own)

    answer: Received = with_ingress(models, use, config, **options)
    return answer


def two() -> dict[str, Replicas]:
    return {"a": Replicas(answering("Of a.")), "b": Replicas(answering("Of b."))}


def content(received: Received) -> str:
    assert received.status == 200, received.body
    return str(received.json["choices"][0]["message"]["content"])


# -- which model


def test_a_request_gets_to_its_model() -> None:
    async def use(ingress: Ingress) -> None:
        for name, text in (("a", "Of a."), ("B", "Of b."), ("b-alias", "Of b.")):
            got = await ask(ingress, "POST", PATH, {**CHAT, "model": name})
            assert content(got) == text
        got = await ask(
            ingress, "POST", "/api/chat", {**CHAT, "model": "b:latest", "stream": False}
        )
        assert got.json["message"]["content"] == "Of b."
        got = await ask(ingress, "POST", "/tokenize?model=b", {"content": "x"})
        assert got.status == 200
        assert (await ask(ingress, "GET", "/v1/models/b")).json["id"]
        assert (await ask(ingress, "GET", "/openapi.json")).status == 200

    models = two()
    with_ingress(models, use)
    assert all(one.cancelled for replicas in models.values() for one in replicas.responses)
    assert models["b"].running[0].greetings == [b"secret me\n"]  # one connection for all


def test_the_only_model_is_meant_by_any_name() -> None:
    assert content(asked({"a": Replicas(answering("Yes."))}, "POST", PATH, {**CHAT, "model": "x"}))


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (PATH, {"error": {"code": "model_not_found"}}),
        ("/v1/messages", {"type": "error", "error": {"type": "not_found_error"}}),
        ("/api/chat", {"error": "There is no model 'x'. The models are: a, b."}),
    ],
)
def test_an_unknown_model_is_a_404_in_the_form_of_the_route(path: str, shape: Any) -> None:
    got = asked(two(), "POST", path, {"model": "x", "messages": HI, "max_tokens": 1})
    assert got.status == 404
    error = got.json["error"]
    if isinstance(error, str):
        assert got.json == shape
    else:
        assert shape["error"].items() <= error.items()
        assert "The models are: a, b." in error["message"]


def test_json_that_is_none_is_refused_here() -> None:
    models = two()
    got = asked(models, "POST", PATH, b"{")
    assert (got.status, got.json["error"]["type"]) == (400, "invalid_request_error")
    assert not models["a"].hints


def test_the_prefix_of_the_application_is_left_out() -> None:
    assert content(asked(two(), "POST", PATH, CHAT, root_path="/llm")) == "Of a."


def test_requests_that_begin_alike_have_hints_that_begin_alike() -> None:
    models = two()

    async def use(ingress: Ingress) -> None:
        for question in ("Why? " * 100 + "1", "Why? " * 100 + "2", "What?"):
            turns = [{"role": "user", "content": question}]
            content(await ask(ingress, "POST", PATH, {"model": "a", "messages": turns}))

    with_ingress(models, use)
    first, second, other = (hint.blocks for hint in models["a"].hints)
    assert first[0] == second[0] != other[0]


# -- replicas that are lost


def test_a_request_goes_to_another_replica_when_the_first_dies_before_it_has_answered() -> None:
    models = {"a": Replicas(endless(), answering("Of the other."))}

    async def use(ingress: Ingress) -> Received:
        task = asyncio.create_task(ask(ingress, "POST", PATH, CHAT))
        first = models["a"].running[0]
        while not len(first.server.lifecycle.services.dispatcher):
            await asyncio.sleep(0)
        first.die()
        return await task

    assert content(with_ingress(models, use)) == "Of the other."
    assert [one.cancelled for one in models["a"].responses] == [True, True]


def test_a_replica_that_nobody_has_reached_is_asked_for_again() -> None:
    models = {"a": Replicas(LostError(), LostError(), answering("Yes."))}
    assert content(asked(models, "POST", PATH, CHAT)) == "Yes."
    assert len(models["a"].responses) == 3


def test_without_a_replica_a_request_gets_a_503_that_says_when_to_try_again() -> None:
    models = {"a": Replicas(None)}
    got = asked(models, "POST", PATH, CHAT, patience=0.05)
    assert (got.status, got.headers["retry-after"]) == (503, "5")
    assert got.json["error"]["code"] == "no_replica"
    assert models["a"].responses[0].cancelled


def test_a_model_that_failed_to_deploy_is_not_waited_for() -> None:
    models = {"a": Replicas(AbsentError())}
    assert asked(models, "POST", PATH, CHAT).json["error"]["code"] == "no_replica"
    assert len(models["a"].responses) == 1


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (PATH, b'data: {"error":{"code":"model_process_'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
        ("/api/chat", b'{"error":"The process of the model ended'),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_one_error_in_its_own_form(
    path: str, last: bytes
) -> None:
    models = {"a": Replicas(endless())}

    async def use(ingress: Ingress) -> Received:
        began = asyncio.Event()
        body = {**CHAT, "stream": True, "max_tokens": 90_000}
        task = asyncio.create_task(ask(ingress, "POST", path, body, began=began))
        await began.wait()
        models["a"].running[0].die()
        return await task

    got = with_ingress(models, use)
    assert got.status == 200
    assert got.body.count(last) == 1
    assert last in got.body[-400:]


def test_a_client_that_leaves_frees_its_slot() -> None:
    models = {"a": Replicas(endless())}

    async def use(ingress: Ingress) -> None:
        began = asyncio.Event()
        body = {**CHAT, "stream": True, "max_tokens": 90_000}
        task = asyncio.create_task(ask(ingress, "POST", PATH, body, began=began))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert models["a"].responses[0].cancelled
        while any(one["is_processing"] for one in (await ask(ingress, "GET", "/slots")).json):
            pass

    with_ingress(models, use)


# -- who may ask, and how much


def test_a_key_is_needed_but_for_health() -> None:
    models = {"a": Replicas(answering("Yes."))}

    async def use(ingress: Ingress) -> None:
        for path in ("/v1/models", "/slots", "/nothing", "/v1/stream?conv_id=1"):
            got = await ask(ingress, "GET", path)
            assert (got.status, got.json["error"]["type"]) == (401, "authentication_error"), path
        assert not models["a"].hints
        assert (await ask(ingress, "GET", "/health/live")).status == 200
        assert (await ask(ingress, "GET", "/slots", headers={"X-Api-Key": "k"})).status == 200

    with_ingress(models, use, Config(api_keys=("k",)))


def test_keys_of_a_file(tmp_path: Any) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("one", "1"))

    async def use(ingress: Ingress) -> None:
        assert (await ask(ingress, "GET", "/slots", headers={"X-Api-Key": "2"})).status == 401
        assert (await ask(ingress, "GET", "/slots", headers={"X-Api-Key": "1"})).status == 200
        path.write_text(table("one", "1") + table("two", "2"))
        assert (await ask(ingress, "GET", "/slots", headers={"X-Api-Key": "2"})).status == 200

    with_ingress({"a": Replicas(answering("Yes."))}, use, Config(keys_file=str(path)))


def test_a_body_may_be_too_large_or_stay_away() -> None:
    models = two()
    assert asked(models, "POST", PATH, CHAT, config=Config(max_body_size=10)).status == 413
    got = asked(two(), "POST", PATH, CHAT, comes=False, config=Config(timeout=0.01))
    assert (got.status, got.json["error"]["type"]) == (408, "invalid_request_error")
    assert not models["a"].hints


def test_pages_of_other_sites_may_not_use_it_and_those_of_this_machine_may() -> None:
    async def use(ingress: Ingress) -> None:
        got = await ask(ingress, "POST", PATH, CHAT, {"Origin": "https://evil.example"})
        assert got.status == 403
        origin = {"Origin": "http://localhost:3000"}
        got = await ask(ingress, "POST", PATH, CHAT, origin)
        assert got.headers["access-control-allow-origin"] == origin["Origin"]

    with_ingress(two(), use)


def test_the_proxy_tells_the_id_that_a_client_has_given() -> None:
    got = asked(two(), "GET", "/health/live", None, {"X-Request-Id": "id-1"})
    assert "x-request-id" not in got.headers
    assert asked(two(), "GET", "/health/live").headers["x-request-id"]


# -- all models


def test_a_model_without_a_replica_is_listed_by_its_name() -> None:
    async def use(ingress: Ingress) -> None:
        got = (await ask(ingress, "GET", "/v1/models")).json
        assert [one["id"] for one in got["data"]][1:] == ["b"]
        assert got["has_more"] is False  # or Anthropic's SDK would ask for ever
        got = (await ask(ingress, "GET", "/api/tags")).json
        assert len(got["models"]) == 2

    with_ingress({**two(), "b": Replicas(None)}, use)


def test_it_is_ready_when_any_model_is() -> None:
    assert asked({**two(), "a": Replicas(None)}, "GET", "/health/ready").status == 200
    none = {"a": Replicas(None), "b": Replicas(AbsentError())}
    assert asked(none, "GET", "/health/ready").status == 503


def test_several_models_have_the_props_of_a_router() -> None:
    async def use(ingress: Ingress) -> None:
        assert (await ask(ingress, "GET", "/props")).json["role"] == "router"
        assert (await ask(ingress, "GET", "/props?model=b")).json["total_slots"] == 2

    with_ingress(two(), use)


# -- states that one replica has


def replicated(**config: Any) -> dict[str, Replicas]:
    return {**two(), "a": Replicas(answering("One."), answering("Two."), **config)}


def test_slots_of_all_replicas_are_listed_with_their_names() -> None:
    async def use(ingress: Ingress) -> None:
        slots = (await ask(ingress, "GET", "/slots?model=a")).json
        found = [(one["id"], one["replica"]) for one in slots]
        assert found == [(0, "r1"), (1, "r1"), (0, "r2"), (1, "r2")]
        slots = (await ask(ingress, "GET", "/slots?model=a&replica=r1")).json
        assert len(slots) == 2 and "replica" not in slots[0]
        assert "replica" not in (await ask(ingress, "GET", "/slots?model=b")).json[0]

    with_ingress(replicated(), use, several=["a"])


def test_a_replica_that_does_not_answer_is_left_out_of_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_PATIENCE", 0.2)
    models = replicated()
    models["a"].names.append("r3")
    models["a"].plays[:] = [None]
    got = asked(models, "GET", "/slots?model=a", several=["a"])
    assert {one["replica"] for one in got.json} == {"r1", "r2"}


def test_what_is_about_one_replica_has_to_name_it() -> None:
    async def use(ingress: Ingress) -> None:
        path = "/slots/0?action=erase"
        got = await ask(ingress, "POST", path, {"model": "a"})
        assert got.status == 501 and "?replica=" in got.json["error"]["message"]
        assert (await ask(ingress, "POST", f"{path}&replica=r3", {"model": "a"})).status == 404
        got = await ask(ingress, "POST", f"{path}&replica=r2", {"model": "a"})
        assert got.status != 501 or "--slot-save-path" in got.json["error"]["message"]

    models = replicated()
    with_ingress(models, use, several=["a"])
    assert models["a"].hints[-1].key == "r2"


def test_adapters_are_set_in_all_replicas() -> None:
    models = replicated()
    got = asked(models, "POST", "/lora-adapters?model=a", b"[]", several=["a"])
    assert got.json == {"success": True}
    assert [hint.key for hint in models["a"].hints] == ["r1", "r2"]


def test_without_a_router_of_requests_nobody_knows_the_replicas() -> None:
    models = replicated()
    models["a"].names.clear()
    assert asked(models, "GET", "/slots?model=a", several=["a"]).status == 501


def test_metrics_have_the_names_of_models_and_replicas() -> None:
    async def use(ingress: Ingress) -> None:
        text = (await ask(ingress, "GET", "/metrics")).body.decode()
        for labels in ('model_name="a",replica="r1"', 'model_name="a",replica="r2"'):
            assert f"trioserve:num_requests_running{{{labels}" in text
        assert 'trioserve:http_connections{ingress="me"}' in text
        found = (await ask(ingress, "GET", "/v1/metrics?model=a")).json["models"]
        assert found.keys() == {"a"} and found["a"].keys() == {"r1", "r2"}

    models = {"a": replicated(metrics_endpoint=True)["a"]}
    with_ingress(models, use, Config(metrics_endpoint=True), several=["a"])


@pytest.mark.parametrize("path", ["/metrics", "/v1/metrics"])
def test_metrics_are_there_when_the_configuration_says_so(path: str) -> None:
    got = asked(two(), "GET", path)
    assert got.status == 501 and "--metrics" in got.json["error"]["message"]


# -- what other ingresses have


class Others:
    """Other ingresses, which answer with JSON by their names."""

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self._answers = answers

    @property
    def peers(self) -> Peers:
        return Peers(name="me", names=self._names, call=self._call, lost=(LostError,))

    async def _names(self) -> list[str]:
        return ["me", *self._answers]

    async def _call(self, scope: Any, body: bytes, name: str) -> AsyncIterator[Any]:
        self.asked.append((name, scope["path"], body))
        answer = self._answers[name]
        if isinstance(answer, Exception):
            raise answer
        status, value = answer
        yield {"type": "http.response.start", "status": status, "headers": []}
        yield {
            "type": "http.response.body", "body": json.dumps(value).encode(), "more_body": False
        }  # fmt: skip


def test_a_stream_is_read_where_it_is() -> None:
    others = Others(you=(200, "of you"))

    async def use(ingress: Ingress) -> None:
        homes = {str(n): await others.peers.home_of(str(n)) for n in range(20)}
        assert {*homes.values()} == {"me", "you"}
        for id_, home in homes.items():
            headers = {"X-Conversation-Id": id_}
            got = await ask(ingress, "POST", PATH, {**CHAT, "stream": True}, headers)
            read = await ask(ingress, "GET", f"/v1/stream?conv_id={id_}")
            assert (got.body == b'"of you"') == (read.body == b'"of you"') == (home == "you")
        got = await ask(ingress, "POST", PATH, CHAT, {"Prefer": "respond-async"})
        location = got.headers["location"]
        assert location.startswith("/v1/stream/me.")
        assert "Of a." in text_in((await ask(ingress, "GET", location)).body)
        assert (await ask(ingress, "GET", "/v1/stream/you.x")).json == "of you"
        assert (await ask(ingress, "GET", "/v1/stream/unknown.x")).status in (200, 404)

    with_ingress(two(), use, peers=others.peers, is_single=False)
    assert ("you", PATH, json.dumps({**CHAT, "stream": True}).encode()) in others.asked


def test_conversations_are_looked_up_in_all_ingresses() -> None:
    others = Others(you=(200, [{"conversation_id": "x"}]), gone=LostError())

    async def use(ingress: Ingress) -> Received:
        body = {"conversation_ids": ["x", "y"]}
        return await ask(ingress, "POST", "/v1/streams/lookup", body)

    got = with_ingress(two(), use, peers=others.peers, is_single=False)
    assert got.json == [{"conversation_id": "x"}]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("chat/completions/control", (200, {"success": True})),
        ("responses/x/stop", (404, {"error": {"code": "tool_call_not_found"}})),
    ],
)
def test_who_gives_an_answer_is_asked_for_it(path: str, answer: Any) -> None:
    others = Others(gone=LostError(), you=answer)
    body = {"id": "x", "action": "cancel", "call_id": "c"}
    got = asked(two(), "POST", f"/v1/{path}", body, peers=others.peers, is_single=False)
    assert (got.status, got.json) == answer


def test_without_a_router_of_requests_streams_cannot_be_found_again() -> None:
    async def use(ingress: Ingress) -> None:
        assert (await ask(ingress, "GET", "/v1/stream?conv_id=1")).status == 501
        assert (await ask(ingress, "POST", f"{PATH}/control", {"id": "x"})).status == 501
        headers = {"X-Conversation-Id": "c1", "Prefer": "respond-async"}
        assert content(await ask(ingress, "POST", PATH, CHAT, headers)) == "Of a."

    with_ingress(two(), use, is_single=False)
