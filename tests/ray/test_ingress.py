import asyncio
import json
from collections.abc import AsyncGenerator
from contextvars import ContextVar

import pytest

from tests.server.test_keys import table
from tests.support.ray_replicas import (
    LostError,
    Play,
    Received,
    Replicas,
    ask,
    events,
    fails,
    ingress_of,
    json_answer,
    never,
    text_answer,
)
from trioserve.api.base.generation import NOT_RUNNING
from trioserve.config import Config
from trioserve.ray.calls import HEAD, TAKEN, Part

CHAT = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}


def asked(app, *args, **options) -> Received:
    return asyncio.run(ask(app, *args, **options))


def sent_to(replicas: Replicas, index: int = -1) -> tuple[str, str, dict[str, str], bytes]:
    (method, target, headers, body), _ = replicas.calls[index]
    return method, target, {name.decode(): text.decode() for name, text in headers}, body


@pytest.fixture
def two() -> dict[str, Replicas]:
    return {"a": Replicas(json_answer("of a")), "b": Replicas(json_answer("of b"))}


# -- which model


@pytest.mark.parametrize(
    ("target", "body", "model"),
    [
        ("/v1/chat/completions", CHAT, "a"),
        ("/v1/chat/completions", {**CHAT, "model": "B"}, "b"),
        ("/v1/messages", {**CHAT, "model": "b-alias"}, "b"),
        ("/api/chat", {**CHAT, "model": "b:latest"}, "b"),
        ("/api/show", {"name": "b"}, "b"),
        ("/tokenize?model=b", {"content": "x"}, "b"),
        ("/v1/models/b", None, "b"),
        ("/openapi.json", None, "a"),
        ("/assets/index.js", None, "a"),
        ("/tools", None, "a"),
        ("/tools", {"tool": "x", "params": {"model": "b"}}, "a"),
        ("/tools?model=b", {"tool": "x"}, "b"),
        ("/cors-proxy?url=http://x", None, "a"),
    ],
)
def test_a_request_gets_to_its_model(two, target, body, model) -> None:
    got = asked(ingress_of(two), "POST" if body else "GET", target, body)
    assert (got.status, got.json) == (200, f"of {model}")
    method, sent_target, _, sent_body = sent_to(two[model])
    assert (method, sent_target) == ("POST" if body else "GET", target)
    assert sent_body == (json.dumps(body).encode() if body else b"")


def test_a_form_names_its_model(two) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nb\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    got = asked(ingress_of(two), "POST", "/v1/audio/transcriptions", form, headers)
    assert got.json == "of b"


def test_the_only_model_is_meant_by_any_name() -> None:
    got = asked(
        ingress_of({"a": Replicas(json_answer(1))}), "POST", "/v1/completions", {"model": "x"}
    )
    assert got.json == 1


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", {"error": {"code": "model_not_found"}}),
        ("/v1/messages", {"type": "error", "error": {"type": "not_found_error"}}),
        ("/api/chat", {"error": "There is no model 'x'. The models are: a, b."}),
    ],
)
def test_an_unknown_model_is_a_404_in_the_form_of_the_route(two, path, shape) -> None:
    got = asked(ingress_of(two), "POST", path, {"model": "x"})
    assert got.status == 404
    error = got.json["error"]
    if isinstance(error, str):
        assert got.json == shape
    else:
        assert shape["error"].items() <= error.items()
        assert "The models are: a, b." in error["message"]


def test_json_that_is_none_is_refused_here(two) -> None:
    got = asked(ingress_of(two), "POST", "/v1/chat/completions", b"{")
    assert (got.status, got.json["error"]["type"]) == (400, "invalid_request_error")
    assert not two["a"].calls


def test_the_prefix_of_the_application_is_not_passed_on(two) -> None:
    got = asked(ingress_of(two), "POST", "/v1/chat/completions", CHAT, root_path="/llm")
    assert got.status == 200
    assert sent_to(two["a"])[1] == "/v1/chat/completions"


def test_a_child_learns_whose_request_it_is_and_since_when(two) -> None:
    headers = {
        "Authorization": "Bearer k",
        "X-Forwarded-For": "203.0.113.9",
        "X-Request-Id": "id-1",
        "Connection": "close",
    }
    asked(ingress_of(two), "POST", "/v1/chat/completions", CHAT, headers)
    _, _, sent, _ = sent_to(two["a"])
    assert sent["authorization"] == "Bearer k"
    assert sent["x-forwarded-for"] == "192.0.2.1"
    assert sent["x-request-id"] == "id-1"
    assert 0 <= float(sent["x-request-waited"]) < 5
    assert "connection" not in sent and "host" not in sent


# -- answers


def test_a_stream_is_passed_on() -> None:
    replicas = Replicas(events(b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"))
    got = asked(ingress_of({"a": replicas}), "POST", "/v1/completions", {"stream": True})
    assert got.headers["content-type"] == "text/event-stream"
    assert got.body == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert replicas.responses[0].cancelled  # which does nothing at its end


@pytest.mark.parametrize(
    ("path", "content_type", "last"),
    [
        ("/v1/chat/completions", "text/event-stream", b'data: {"error":{"code":"model_process_'),
        ("/v1/messages", "text/event-stream", b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", "text/event-stream", b'data: {"type":"error","sequence_number":2,'),
        ("/api/chat", "application/x-ndjson", b'{"error":"The process of the model ended'),
    ],
)
def test_a_stream_whose_replica_dies_ends_with_one_error_in_its_own_form(
    path, content_type, last
) -> None:
    replicas = Replicas(
        events(b"data: 1\n\n", b"data: 2\n\n", LostError(), content_type=content_type)
    )
    got = asked(ingress_of({"a": replicas}), "POST", path, {"stream": True})
    assert got.status == 200
    rest = got.body.removeprefix(b"data: 1\n\ndata: 2\n\n")
    assert last in rest
    assert rest.count(b"\ndata:") + rest.startswith((b"data:", b"{")) == 1


def test_an_answer_that_is_no_stream_breaks_off_when_its_replica_dies() -> None:
    head = (HEAD, 200, [(b"content-type", b"audio/wav"), (b"content-length", b"9")], b"one")
    replicas = Replicas(fails(LostError(), (TAKEN,), head))
    with pytest.raises(Exception, match="ended before it had answered"):
        asked(ingress_of({"a": replicas}), "GET", "/sound")


def test_without_a_replica_a_request_gets_a_503_that_says_when_to_try_again() -> None:
    app = ingress_of({"a": Replicas(never)}, patience=0.05)
    got = asked(app, "POST", "/v1/chat/completions", CHAT)
    assert (got.status, got.headers["retry-after"]) == (503, "5")
    assert got.json["error"]["code"] == "no_replica"


def test_an_unexpected_error_is_a_500_that_tells_nothing() -> None:
    app = ingress_of({"a": Replicas(fails(KeyError("secret")))})
    got = asked(app, "POST", "/v1/chat/completions", CHAT)
    assert got.status == 500
    assert b"secret" not in got.body


def test_a_client_that_leaves_ends_its_call() -> None:
    replicas = Replicas(never)

    async def leave() -> None:
        app = ingress_of({"a": replicas})
        task = asyncio.create_task(ask(app, "POST", "/v1/chat/completions", CHAT))
        while not replicas.responses:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave())
    assert replicas.responses[0].cancelled


# -- who may ask, and how much


def test_a_key_is_needed_but_for_health() -> None:
    replicas = Replicas(json_answer(1))
    app = ingress_of({"a": replicas}, Config(api_keys=("k",)))
    for path in ("/v1/models", "/slots", "/nothing", "/v1/stream?conv_id=1"):
        got = asked(app, "GET", path)
        assert (got.status, got.json["error"]["type"]) == (401, "authentication_error"), path
    assert not replicas.calls
    assert asked(app, "GET", "/health/live").status == 200
    assert asked(app, "GET", "/slots", headers={"X-Api-Key": "k"}).status == 200


def test_keys_of_a_file(tmp_path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(table("one", "1"))
    replicas = Replicas(json_answer(1))
    app = ingress_of({"a": replicas}, Config(keys_file=str(path)))
    assert asked(app, "GET", "/slots", headers={"X-Api-Key": "2"}).status == 401
    assert not replicas.calls
    assert asked(app, "GET", "/slots", headers={"X-Api-Key": "1"}).status == 200
    path.write_text(table("one", "1") + table("two", "2"))
    assert asked(app, "GET", "/slots", headers={"X-Api-Key": "2"}).status == 200


def test_a_body_may_be_too_large() -> None:
    replicas = Replicas(json_answer(1))
    app = ingress_of({"a": replicas}, Config(max_body_size=10))
    got = asked(app, "POST", "/v1/chat/completions", CHAT)
    assert got.status == 413
    assert not replicas.calls


def test_a_long_body_gets_to_its_model_as_it_is(two) -> None:
    body = {"model": "b", "prompt": "x" * 100_000}
    assert asked(ingress_of(two), "POST", "/completion", body).json == "of b"
    assert sent_to(two["b"])[3] == json.dumps(body).encode()


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    replicas = Replicas(json_answer(1))
    app = ingress_of({"a": replicas}, Config(timeout=0.01))
    got = asked(app, "POST", "/v1/chat/completions", CHAT, comes=False)
    assert (got.status, got.json["error"]["type"]) == (408, "invalid_request_error")
    assert not replicas.calls


def test_a_body_whose_values_take_too_much_memory_is_refused() -> None:
    app = ingress_of({"a": Replicas(json_answer(1))}, Config(max_request_memory=2**20))
    got = asked(app, "POST", "/completion", {"prompt": [1] * 100_000})
    assert got.status == 413
    assert asked(app, "POST", "/completion", {"prompt": [1]}).status == 200


def test_pages_of_other_sites_may_not_use_it() -> None:
    app = ingress_of({"a": Replicas(json_answer(1))})
    got = asked(app, "POST", "/completion", {}, {"Origin": "https://evil.example"})
    assert got.status == 403


def test_pages_of_this_machine_may() -> None:
    app = ingress_of({"a": Replicas(json_answer(1, access_control_allow_origin="*"))})
    origin = {"Origin": "http://localhost:3000"}
    got = asked(app, "POST", "/completion", {}, origin)
    assert got.headers["access-control-allow-origin"] == origin["Origin"]
    preflight = asked(app, "OPTIONS", "/completion", headers=origin)
    assert preflight.status == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]


# -- all models


def test_lists_are_merged(two) -> None:
    two["a"] = Replicas(json_answer({"object": "list", "data": [{"id": "a"}]}))
    two["b"] = Replicas(json_answer({"object": "list", "data": [{"id": "b"}]}))
    got = asked(ingress_of(two), "GET", "/v1/models").json
    assert got["data"] == [{"id": "a"}, {"id": "b"}]
    assert [each["name"] for each in got["models"]] == ["a", "b"]
    assert (got["first_id"], got["last_id"]) == ("a", "b")
    assert got["has_more"] is False  # or Anthropic's SDK would ask for ever


def test_a_model_without_a_replica_is_listed_by_its_name(two, monkeypatch) -> None:
    monkeypatch.setattr("trioserve.ray.routes._LIST_PATIENCE", 0.01)
    two["b"] = Replicas(never)
    two["a"] = Replicas(json_answer({"object": "list", "data": [{"id": "a"}]}))
    got = asked(ingress_of(two), "GET", "/v1/models").json
    assert [one["id"] for one in got["data"]] == ["a", "b"]


def test_it_is_ready_when_any_model_is(two, monkeypatch) -> None:
    monkeypatch.setattr("trioserve.ray.routes._LIST_PATIENCE", 0.01)
    two["a"] = Replicas(never)
    assert asked(ingress_of(two), "GET", "/health/ready").status == 200
    two["b"] = Replicas(json_answer({"error": "loading"}, 503))
    assert asked(ingress_of(two), "GET", "/health/ready").status == 503


def test_several_models_have_the_props_of_a_router(two) -> None:
    app = ingress_of(two)
    assert asked(app, "GET", "/props").json["role"] == "router"
    assert asked(app, "GET", "/props?model=b").json == "of b"


# -- states that one replica has


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/slots"), ("POST", "/slots/0"), ("POST", "/lora-adapters")]
)
def test_without_a_router_of_requests_nobody_knows_the_replicas(two, method, path) -> None:
    app = ingress_of(two, several=["a"], finds_replicas=False)
    assert asked(app, method, f"{path}?model=a").status == 501
    assert asked(app, method, f"{path}?model=b").json == "of b"


def _named(*names: str, **plays: Play) -> Replicas:
    """Replicas of these names: each answers as its own play does, and others with an error."""

    async def play(sent, hint) -> AsyncGenerator[Part, None]:
        async for part in plays.get(hint.key, json_answer("nobody", 500))(sent, hint):
            yield part

    replicas = Replicas(play)
    replicas.names[:] = names or plays
    return replicas


def test_slots_of_all_replicas_are_listed_with_their_names(two) -> None:
    two["a"] = _named(r1=json_answer([{"id": 0}]), r2=json_answer([{"id": 0}, {"id": 1}]))
    app = ingress_of(two, several=["a"])
    assert asked(app, "GET", "/slots?model=a").json == [
        {"id": 0, "replica": "r1"},
        {"id": 0, "replica": "r2"},
        {"id": 1, "replica": "r2"},
    ]
    assert asked(app, "GET", "/slots?model=a&replica=r1").json == [{"id": 0}]
    assert sent_to(two["a"])[1] == "/slots?model=a"


def test_a_replica_that_does_not_answer_is_left_out_of_lists(two) -> None:
    two["a"] = _named(r1=fails(LostError(), (TAKEN,)), r2=json_answer([{"id": 0}]))
    got = asked(ingress_of(two, several=["a"]), "GET", "/slots?model=a")
    assert got.json == [{"id": 0, "replica": "r2"}]


def test_what_is_about_one_replica_has_to_name_it(two) -> None:
    two["a"] = _named(r1=json_answer(1), r2=json_answer(2))
    app = ingress_of(two, several=["a"])
    got = asked(app, "POST", "/slots/0?action=erase", {"model": "a"})
    assert got.status == 501 and "?replica=" in got.json["error"]["message"]
    assert asked(app, "POST", "/slots/0?action=erase&replica=r2", {"model": "a"}).json == 2
    assert asked(app, "POST", "/slots/0?action=erase&replica=r3", {"model": "a"}).status == 404


def test_adapters_are_set_in_all_replicas(two) -> None:
    two["a"] = _named(r1=json_answer({"success": True}), r2=json_answer({"error": 1}, 400))
    assert (
        asked(ingress_of(two, several=["a"]), "POST", "/lora-adapters?model=a", b"[]").status == 400
    )
    assert {hint.key for _, hint in two["a"].calls} == {"r1", "r2"}


def test_who_gives_an_answer_is_asked_for_it(two) -> None:
    unknown = json_answer({"success": False, "message": NOT_RUNNING})
    two["a"] = _named(r1=unknown, r2=unknown)
    two["b"] = _named(r1=unknown, r2=json_answer({"success": True}))
    app = ingress_of(two, several=["a", "b"])
    path, body = "/v1/chat/completions/control", {"id": "x", "action": "cancel"}
    assert asked(app, "POST", path, body).json == {"success": True}
    assert asked(app, "POST", path, {**body, "model": "a"}).json["success"] is False


@pytest.mark.parametrize("path", ["chat/completions/x/approve", "responses/x/stop"])
def test_who_runs_a_call_decides_about_it(two, path) -> None:
    unknown = json_answer({"error": {"code": 404, "param": "id"}}, 404)
    no_call = json_answer({"error": {"code": "tool_call_not_found", "param": None}}, 404)
    two["a"] = _named(r1=unknown, r2=unknown)
    two["b"] = _named(r1=no_call, r2=unknown)
    app = ingress_of(two, several=["a", "b"])
    answer = asked(app, "POST", f"/v1/{path}", {"call_id": "c"})
    assert answer.json["error"]["code"] == "tool_call_not_found"


def test_metrics_have_the_names_of_models_and_replicas(two) -> None:
    text = '# HELP x About x\n# TYPE x gauge\nx 1.0\nx{model_name="other",y="2"} 3.0\n'
    two["a"] = _named(r1=text_answer(text), r2=text_answer(text))
    two["b"] = Replicas(text_answer(text))
    app = ingress_of(two, Config(metrics_endpoint=True), several=["a"])
    got = asked(app, "GET", "/metrics").body.decode()
    assert got.splitlines() == [
        "# HELP x About x",
        "# TYPE x gauge",
        'x{model_name="a",replica="r1"} 1.0',
        'x{model_name="a",replica="r1",y="2"} 3.0',
        'x{model_name="a",replica="r2"} 1.0',
        'x{model_name="a",replica="r2",y="2"} 3.0',
        'x{model_name="b",replica=""} 1.0',
        'x{model_name="b",replica="",y="2"} 3.0',
    ]


def test_snapshots_of_metrics_are_gathered(two) -> None:
    two["a"] = _named(r1=json_answer({"x": 1}), r2=json_answer({"x": 2}))
    app = ingress_of(two, Config(metrics_endpoint=True), several=["a"])
    got = asked(app, "GET", "/v1/metrics?model=a").json
    assert got == {"object": "metrics", "models": {"a": {"r1": {"x": 1}, "r2": {"x": 2}}}}


@pytest.mark.parametrize("path", ["/metrics", "/v1/metrics"])
def test_metrics_are_there_when_the_configuration_says_so(two, path) -> None:
    got = asked(ingress_of(two), "GET", path)
    assert got.status == 501 and "--metrics" in got.json["error"]["message"]
    assert not two["a"].calls


def test_a_conversation_always_gets_to_the_same_replica(two) -> None:
    app = ingress_of(two, several=["a"])
    asked(app, "POST", "/v1/chat/completions", CHAT, {"X-Conversation-Id": "c1"})
    assert two["a"].calls[-1][1].key == "c1"
    two["a"]._plays[:] = [json_answer({"error": 1}, 404)]
    got = asked(app, "GET", "/v1/stream?conv_id=c1")
    assert [replicas.calls[-1][1].key for replicas in two.values()] == ["c1", "c1"]
    assert got.json == "of b"


def test_a_stream_for_later_has_an_address_that_finds_it(two) -> None:
    location = {"location": "/v1/stream/secret"}
    two["b"] = Replicas(json_answer(location, 202, location="/v1/stream/secret"), json_answer(1))
    app = ingress_of(two, several=["b"])
    got = asked(
        app, "POST", "/v1/completions", {"model": "b", "prompt": ""}, {"Prefer": "respond-async"}
    )
    assert (got.status, got.headers["location"]) == (202, got.json["location"])
    assert asked(app, "GET", got.json["location"] + "&from=3").json == 1
    first, second = two["b"].calls
    assert first[1].key == second[1].key is not None
    assert second[0][1] == "/v1/stream/secret?from=3"


@pytest.mark.parametrize("at", ["", "?at=", "?at=x", "?at=WzFd", "?at=WyJ4IiwgInkiXQ=="])
def test_an_address_that_finds_nothing_is_a_404(two, at) -> None:
    assert asked(ingress_of(two), "GET", f"/v1/stream/secret{at}").status == 404


def test_calls_at_the_same_time_have_contexts_of_their_own(two) -> None:
    # Serve keeps a request's id there, by which its router would take one call for the other.
    contexts = []
    seen: ContextVar[str] = ContextVar("seen", default="fresh")

    async def play(sent, hint) -> AsyncGenerator[Part, None]:
        contexts.append(seen.get())
        async for part in json_answer([])(sent, hint):
            yield part

    async def lookup() -> None:
        seen.set("shared")
        app = ingress_of({"a": Replicas(play)})
        await ask(app, "POST", "/v1/streams/lookup", {"conversation_ids": ["c1", "c2"]})

    asyncio.run(lookup())
    assert contexts == ["fresh", "fresh"]


def test_a_lookup_without_a_replica_is_a_503(two) -> None:
    two["b"] = Replicas(never)
    body = {"conversation_ids": ["c1", "c2"]}
    got = asked(ingress_of(two, patience=0.05), "POST", "/v1/streams/lookup", body)
    assert (got.status, got.json["error"]["code"]) == (503, "no_replica")


def test_conversations_are_looked_up_where_they_would_be(two) -> None:
    two["a"] = Replicas(json_answer([{"conversation_id": "x"}]))
    two["b"] = Replicas(json_answer([]))
    body = {"conversation_ids": ["c1", "c2"]}
    got = asked(ingress_of(two), "POST", "/v1/streams/lookup", body).json
    assert len(got) == 2
    assert {call[1].key for call in two["b"].calls} == {"c1", "c2"}


def test_without_a_router_of_requests_streams_cannot_be_found_again(two) -> None:
    app = ingress_of(two, several=["a"], finds_replicas=False)
    assert asked(app, "GET", "/v1/stream?conv_id=1").status == 501
    headers = {"X-Conversation-Id": "c1", "Prefer": "respond-async"}
    assert asked(app, "POST", "/v1/chat/completions", CHAT, headers).status == 200
    assert not {"x-conversation-id", "prefer"} & set(sent_to(two["a"])[2])
