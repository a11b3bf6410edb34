"""Reading, finding and stopping streams."""

from __future__ import annotations

import time

from tests.support.clients import client_of
from tests.support.event_source import ids_in
from tests.support.scripts import CHAT, answering, endless
from trioserve.api.base import limits

CHATS = "/v1/chat/completions"
STREAM = {**CHAT, "stream": True}
NAMED = {"X-Conversation-Id": "one"}


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


# -- offsets


async def test_an_offset_that_is_no_number() -> None:
    async with client_of(answering("Hello")) as client:
        await client.post(CHATS, json=STREAM, headers=NAMED)
        for from_ in ("-1", "1.0", "x", "1_0", "٣", "0x1", " 1", "1" * 30):
            answer = await client.get("/v1/stream", params={"conv_id": "one", "from": from_})
            assert answer.status_code == 400, from_
            assert answer.json()["error"]["param"] == "from"
            if from_ != " 1":
                headers = {b"Last-Event-ID": from_.encode()}
                answer = await client.get("/v1/stream?conv_id=one", headers=headers)
                assert answer.status_code == 400, from_
                assert answer.json()["error"]["param"] == "Last-Event-ID"


async def test_an_offset_that_is_not_there_yet() -> None:
    async with client_of(answering("Hello")) as client:
        whole = await client.post(CHATS, json=STREAM, headers=NAMED)
        end = len(whole.content)
        there = await client.get("/v1/stream", params={"conv_id": "one", "from": end})
        assert (there.status_code, there.content) == (200, b"")
        beyond = await client.get("/v1/stream", params={"conv_id": "one", "from": end + 1})
        assert beyond.status_code == 400
        assert beyond.json()["error"]["message"] == (
            f"The stream has {end} bytes, and none at {end + 1}."
        )


async def test_an_offset_within_an_event() -> None:
    async with client_of(answering("Hello")) as client:
        whole = (await client.post(CHATS, json=STREAM, headers=NAMED)).content
        for offset in (1, 17, len(whole) - 1):
            answer = await client.get("/v1/stream", params={"conv_id": "one", "from": offset})
            assert answer.content == whole[offset:]
            headers = {"Last-Event-ID": str(offset)}
            answer = await client.get("/v1/stream?conv_id=one", headers=headers)
            assert answer.status_code == 400
            assert f"No event of the stream has the id {offset}" in answer.text


async def test_the_last_event_wins_over_the_url() -> None:
    """As an `EventSource` comes back: with the URL that it was made with, and the id."""
    async with client_of(answering("Hello")) as client:
        whole = (await client.post(CHATS, json=STREAM, headers=NAMED)).content
        first = ids_in(whole)[0]
        url = "/v1/stream?conv_id=one&from=0"
        answer = await client.get(url, headers={"Last-Event-ID": str(first)})
        assert answer.content == whole[first:]
        assert (await client.get(url, headers={"Last-Event-ID": ""})).content == whole
        assert (await client.get("/v1/stream?conv_id=one&from=")).content == whole


async def test_head_tells_whether_there_is_a_stream() -> None:
    async with client_of(endless()) as client:
        headers = {**NAMED, "Prefer": "respond-async"}
        accepted = await client.post(CHATS, json=CHAT, headers=headers)
        for url in ("/v1/stream?conv_id=one", accepted.headers["Location"]):
            answer = await client.head(url)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"] == "text/event-stream"
            assert "content-length" not in answer.headers  # it has no end yet
        assert (await client.head("/v1/stream?conv_id=one&from=99999999")).status_code == 400
        assert (await client.head("/v1/stream?conv_id=two")).status_code == 404
        await client.delete("/v1/stream?conv_id=one")


async def test_unknown_streams_and_invalid_names() -> None:
    async with client_of() as client:
        for url in ("/v1/stream?conv_id=one", "/v1/stream/one", "/v1/stream/" + "x" * 32):
            assert (await client.get(url)).status_code == 404
            assert (await client.delete(url)).status_code == 204
        assert (await client.get("/v1/streams")).status_code == 404
        assert (await client.get("/v1/streams/lookup")).status_code == 405
        for query in ("", "?conv_id=", "?conv_id=%00", "?conv_id=" + "x" * 257):
            for method in ("GET", "DELETE"):
                answer = await client.request(method, f"/v1/stream{query}")
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conv_id")


# -- lookups


async def test_lookup() -> None:
    async with client_of(endless()) as client:
        began = int(time.time())
        headers = {**NAMED, "Prefer": "respond-async"}
        await client.post(CHATS, json=CHAT, headers=headers)
        limited = {**STREAM, "max_tokens": 3}
        two = await client.post(CHATS, json=limited, headers={"X-Conversation-Id": "two::model"})
        wanted = {"conversation_ids": ["two", "none", "one", "", "x" * 1000]}
        finished, running = (await client.post("/v1/streams/lookup", json=wanted)).json()
        assert finished.pop("started_at") in range(began, began + 10)
        assert finished.pop("completed_at") in range(began, began + 10)
        assert finished == {
            "conversation_id": "two::model",
            "is_done": True,
            "total_bytes": len(two.content),
        }
        assert (running["conversation_id"], running["is_done"]) == ("one", False)
        assert running["completed_at"] == 0
        await client.delete("/v1/stream?conv_id=one")


async def test_lookups_that_are_wrong() -> None:
    async with client_of() as client:
        for ids in (None, 5, "one", [1], [None], {"a": "b"}, [["one"]]):
            answer = await client.post("/v1/streams/lookup", json={"conversation_ids": ids})
            assert answer.status_code == 400, ids
            assert answer.json()["error"]["param"] == "conversation_ids"
        assert (await client.post("/v1/streams/lookup", json={})).status_code == 400


async def test_many_lookups_take_no_time() -> None:
    async with client_of(answering("Hello")) as client:
        for n in range(50):
            headers, body = {"X-Conversation-Id": f"{n}"}, {"prompt": "a", "n_predict": 1}
            await client.post("/completion", json={**body, "stream": True}, headers=headers)
        ids = [str(n) for n in range(10_000)]
        began = time.process_time()
        found = (await client.post("/v1/streams/lookup", json={"conversation_ids": ids})).json()
        took = time.process_time() - began
        assert [each["conversation_id"] for each in found] == ids[:50]
        assert took < 0.5
        ids = ["x"] * (limits.MAX_LOOKUPS + 1)
        answer = await client.post("/v1/streams/lookup", json={"conversation_ids": ids})
        assert answer.status_code == 400


# -- keys, and pages of other origins


async def test_names_belong_to_a_key() -> None:
    async with client_of(answering("Hello"), api_keys=("anna", "bert")) as client:
        for one in ("anna", "bert"):
            await client.post(
                "/completion",
                json={"prompt": one, "stream": True, "n_predict": 3},
                headers={**NAMED, **key(one)},
            )
        url = "/v1/stream?conv_id=one"
        texts = [(await client.get(url, headers=key(one))).text for one in ("anna", "bert")]
        assert texts[0] != texts[1]
        await client.delete(url, headers=key("bert"))
        assert (await client.get(url, headers=key("anna"))).text == texts[0]
        for one, n in (("anna", 1), ("bert", 0)):
            found = await client.post(
                "/v1/streams/lookup", json={"conversation_ids": ["one"]}, headers=key(one)
            )
            assert len(found.json()) == n
        for request in (
            client.build_request("GET", url),
            client.build_request("DELETE", url),
            client.build_request("POST", "/v1/streams/lookup", json={"conversation_ids": []}),
        ):
            assert (await client.send(request)).status_code == 401


async def test_a_secret_name_stands_in_for_its_key() -> None:
    async with client_of(answering("Hello"), api_keys=("anna", "bert")) as client:
        headers = {"Prefer": "respond-async"}
        accepted = await client.post(CHATS, json=CHAT, headers={**headers, **key("anna")})
        location = accepted.headers["Location"]
        for shown, status in (({}, 200), (key("anna"), 200), (key("bert"), 403), (key("x"), 403)):
            assert (await client.get(location, headers=shown)).status_code == status
        assert (await client.delete(location, headers=key("bert"))).status_code == 403
        assert (await client.get(location)).status_code == 200
        assert (await client.delete(location)).status_code == 204


async def test_without_keys_a_key_may_be_shown() -> None:
    async with client_of(answering("Hello")) as client:
        accepted = await client.post(CHATS, json=CHAT, headers={"Prefer": "respond-async"})
        answer = await client.get(accepted.headers["Location"], headers=key("any"))
        assert answer.status_code == 200


async def test_pages_of_other_origins_may_send_the_headers() -> None:
    async with client_of(answering("Hello")) as client:
        origin = {"Origin": "http://localhost:3000"}
        preflight = await client.options(CHATS, headers=origin)
        allowed = preflight.headers["Access-Control-Allow-Headers"]
        assert {"X-Conversation-Id", "Last-Event-ID", "Prefer"} <= set(allowed.split(", "))
        answer = await client.post(CHATS, json=STREAM, headers={**NAMED, **origin})
        assert answer.headers.get_list("Access-Control-Allow-Origin") == [origin["Origin"]]
        assert answer.headers.get_list("Vary") == ["Origin"]
        assert "Location" in answer.headers["Access-Control-Expose-Headers"]
        read = await client.get("/v1/stream?conv_id=one", headers=origin)
        assert read.headers["Access-Control-Allow-Origin"] == origin["Origin"]
        foreign = await client.delete(
            "/v1/stream?conv_id=one", headers={"Origin": "http://elsewhere.example"}
        )
        assert foreign.status_code == 403


async def test_metrics() -> None:
    async with client_of(answering("Hello"), metrics_endpoint=True) as client:
        answer = await client.post(CHATS, json=STREAM, headers=NAMED)
        lines = (await client.get("/metrics")).text.splitlines()
        assert {
            'trioserve:streams{state="finished"} 1.0',
            'trioserve:streams{state="running"} 0.0',
            f"trioserve:stream_bytes {float(len(answer.content))}",
            "trioserve:stream_readers 0.0",
            "trioserve:streams_evicted_total 0.0",
        } <= {*lines}
