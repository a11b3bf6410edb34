"""Clients whose answers have to be those of a quiet server: the same request, greedy, alone."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from benchmarks.http1 import ResponseReader
from tests.soak import catalogue
from tests.soak.catalogue import Ask
from tests.soak.clients import ACTS, Act, Client
from tests.soak.said import has_begun_as, said, said_in_stream

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

#: The most requests of a kind that are tried.
MAX_TRIED = 40

#: By how much each token is more likely than the next, in log probabilities; below that, rounding
#: errors decide, which the shapes of batches change.
MARGIN = 0.2

#: Seconds between two polls, and before a batch is cancelled, because it waits for all others.
_POLL = 0.3
_MAX_BATCH = 20.0

#: The number of times that a request is sent while the queue is full.
_TRIES = 8

_NO_DIGITS = str.maketrans("", "", "0123456789")
_ENDED = ("completed", "incomplete", "failed", "cancelled", "expired")
_END_OF_REASONING = "</think>"


@attrs.frozen
class Quiet:
    """A request, and what a quiet server says."""

    path: str
    body: Mapping[str, Any]
    answer: Any


async def quiet_answers(client: Client, source: random.Random, n_each: int = 4) -> list[Quiet]:
    """Ask a quiet server, one request after the other, for a number of each kind.

    Each is asked twice: the second finds its prompt in the cache. What a rounding error decides is
    left out.
    """
    answers: list[Quiet] = []
    for kind in range(catalogue.N_GREEDY):
        wanted = len(answers) + n_each
        for _ in range(MAX_TRIED):
            path, body = catalogue.draw_greedy(source, kind)
            name = " ".join([path, *(body.keys() & {"n", "tools", "response_format"})])
            if await _margin(client, path, body) < MARGIN:
                client.tally.note(f"quiet {name}", "too close to call")
                continue
            first, second = [said(await _answer(client, path, body)) for _ in range(2)]
            client.tally.note(f"quiet {name}", "taken")
            if first != second:
                client.tally.fault(f"a quiet server said {first} and {second} to {path} {body}")
            answers.append(Quiet(path, body, first))
            if len(answers) == wanted:
                break
    return answers


async def _margin(client: Client, path: str, body: Mapping[str, Any]) -> float:
    """The smallest lead of the most likely token over the next one, of all tokens of an answer."""
    prompt = body.get("prompt")
    if prompt is None:
        messages = body.get("messages") or [{"role": "user", "content": body["input"]}]
        template = {"messages": messages, "tools": body.get("tools", [])}
        if path == MESSAGES:
            template["chat_template_kwargs"] = {"enable_thinking": False}
        prompt = (await _answer(client, "/apply-template", template))["prompt"]
    n_tokens = next(
        body[name] for name in ("max_tokens", "max_output_tokens", "n_predict") if name in body
    )
    raw = {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "n_probs": 20}
    tokens = (await _answer(client, "/completion", raw))["completion_probabilities"]
    if not {"response_format", "tools"} & body.keys():
        return min(map(_margin_of, tokens), default=0.0)
    # A grammar begins after the reasoning, whose probabilities a chat does not give.
    words = [token["token"] for token in tokens]
    free = words.index(_END_OF_REASONING) if _END_OF_REASONING in words else len(words)
    more = {"logprobs": True, "top_logprobs": 20, "n": 1}
    (choice,) = (await _answer(client, path, {**body, **more}))["choices"]
    bound = (choice.get("logprobs") or {}).get("content") or []
    return min(map(_margin_of, [*tokens[:free], *bound]), default=0.0)


def _margin_of(token: Mapping[str, Any]) -> float:
    """The lead of a token over the next one. A grammar has refused those above it."""
    others = [one["logprob"] for one in token["top_logprobs"] if one["token"] != token["token"]]
    below = [other for other in others if other <= token["logprob"]]
    return float(token["logprob"] - max(below)) if below else 0.0


async def _answer(client: Client, path: str, body: Mapping[str, Any]) -> Any:
    more = {"store": False} if path == RESPONSES else {}
    data, head = catalogue.request("POST", path, {**body, **more})
    return json.loads((await client.ask_alone(_ask("quiet", data, head))).body)


def _ask(name: str, data: bytes, head: int, *allowed: int) -> Ask:
    return Ask(name=name, data=data, head=head, allowed=frozenset(allowed or {200}))


@attrs.frozen
class CheckedClient(Client):
    """A client that compares what it gets."""

    quiet: Sequence[Quiet] = ()

    # -- what it asks

    async def ask(self) -> None:
        """Ask for a whole answer."""
        one = self._choice()
        answer = await self._post("a whole answer", one.path, one.body, 200, 429)
        if answer.status == 200:
            self._compare("a whole answer", one, said(json.loads(answer.body)))

    async def stream(self) -> None:
        """Ask for a stream, and read it to its end, or leave before that."""
        one = self._choice()
        data, _ = catalogue.request("POST", one.path, {**one.body, "stream": True})
        n_parts = self.source.choice((10**6, 10**6, self.source.randint(1, 20)))
        answer = ResponseReader()
        async with self.connected() as stream:
            await self.send(stream, data)
            while n_parts and not answer.done and await self.receive(stream, answer, 2000):
                n_parts -= 1
        name = "a stream" if n_parts else "a stream that is left"
        self.tally.note(f"checked: {name}", answer.status)
        if answer.status not in (0, 200, 429):
            self.tally.fault(f"checked: {name}: status {answer.status}: {answer.body[:300]!r}")
        elif answer.status == 200 and answer.done:
            self._compare(name, one, said_in_stream(answer.body))
        elif answer.status == 200 and not has_begun_as(answer.body, one.answer):
            self._differs(name, one, answer.body[-2000:])

    async def run_in_background(self) -> None:
        """Begin a response in the background; poll, cancel or delete it."""
        name, one = "a background response", self._choice(RESPONSES)
        answer = await self._post(name, RESPONSES, {**one.body, "background": True}, 200, 429)
        if answer.status != 200:
            return
        path = f"{RESPONSES}/{json.loads(answer.body)['id']}"
        end = self.source.choice(("poll", "poll", "cancel", "delete"))
        if end != "poll":
            await trio.sleep(self.source.uniform(0, 1.5))
        if end == "cancel":
            await self._request(f"{name}, cancel", "POST", f"{path}/cancel", 200)
        if end != "delete":
            response = await self._until_ended(name, path)
            if response["status"] == "failed":
                self._check_failure(name, response["error"]["message"])
            elif response["status"] != "cancelled":
                self._compare(name, one, said(response))
            elif end != "cancel":
                self.tally.fault(f"{name} was cancelled by itself: {response}")
        await self._request(f"{name}, DELETE", "DELETE", path, 200)
        await self._request(f"{name}, GET after DELETE", "GET", path, 404)

    def _check_failure(self, name: str, message: str) -> None:
        self.tally.note(f"checked: {name}, failed", message.translate(_NO_DIGITS))
        if "waiting, and the limit is" not in message:  # the queue was full
            self.tally.fault(f"{name} failed: {message}")

    async def keep(self) -> None:
        """Store a response, read it, continue and delete it."""
        name, one = "a stored response", self._choice(RESPONSES)
        answer = await self._post(name, RESPONSES, one.body, 200, 429)
        if answer.status != 200:
            return
        self._compare(name, one, said(json.loads(answer.body)))
        id_ = json.loads(answer.body)["id"]
        stored = await self._request(f"{name}, GET", "GET", f"{RESPONSES}/{id_}", 200)
        self._compare(name, one, said(json.loads(stored.body)))
        more = {"input": "And then?", "previous_response_id": id_, "max_output_tokens": 8}
        next_ = await self._post(f"{name}, continued", RESPONSES, more, 200, 429)
        for deleted in (id_, *([json.loads(next_.body)["id"]] if next_.status == 200 else [])):
            path = f"{RESPONSES}/{deleted}"
            await self._request(f"{name}, DELETE", "DELETE", path, 200)
            await self._request(f"{name}, GET after DELETE", "GET", path, 404)

    async def run_batch(self) -> None:
        """Run a batch; compare its lines, cancel it, or forget it: then `check_batches` sees it."""
        name = "a batch"
        chosen = [self._choice(CHATS) for _ in range(self.source.randint(1, 6))]
        form = _form([(f"{n} {self.quiet.index(one)}", one) for n, one in enumerate(chosen)])
        uploaded = await self._request(f"{name}, upload", "POST", "/v1/files", 200, body=form)
        file = json.loads(uploaded.body)["id"]
        wanted = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
        created = await self._post(name, "/v1/batches", wanted, 200)
        path = f"/v1/batches/{json.loads(created.body)['id']}"
        if (end := self.source.choice(("wait", "wait", "cancel", "forget"))) == "forget":
            return
        if end == "cancel":
            await trio.sleep(self.source.uniform(0, 2))
            await self._request(f"{name}, cancel", "POST", f"{path}/cancel", 200, 400)
        with trio.move_on_after(_MAX_BATCH) as scope:
            batch = await self._until_ended(name, path)
        if scope.cancelled_caught:
            await self._request(f"{name}, cancel", "POST", f"{path}/cancel", 200, 400)
            batch = await self._until_ended(name, path)
        await self._check_batch(batch, len(chosen))
        for id_ in (file, batch.get("output_file_id")):
            if id_ is not None:
                await self._request(f"{name}, DELETE of a file", "DELETE", f"/v1/files/{id_}", 200)

    async def _check_batch(self, batch: Mapping[str, Any], n_lines: int) -> None:
        """Compare the lines of a batch that has ended."""
        if batch["status"] not in ("completed", "cancelled") or batch.get("error_file_id"):
            self.tally.fault(f"a batch ended so: {batch}")
        answered: list[str] = []
        if (output := batch.get("output_file_id")) is not None:
            content = await self._request(
                "a batch, output", "GET", f"/v1/files/{output}/content", 200
            )
            for line in map(json.loads, content.body.splitlines()):
                answered.append(line["custom_id"])
                one = self.quiet[int(line["custom_id"].split()[1])]
                self._compare("a line of a batch", one, said(line["response"]["body"]))
        if len(set(answered)) != len(answered):
            self.tally.fault(f"lines of a batch have two answers: {answered}")
        if batch["status"] == "completed" and len(answered) != n_lines:
            self.tally.fault(f"a batch of {n_lines} lines has {len(answered)} answers: {batch}")

    async def check_batches(self) -> None:
        """At the end: all batches end, also those that a client has forgotten."""
        path = "/v1/batches?limit=100"
        while True:
            page = json.loads((await self._request("batches", "GET", path, 200)).body)
            for batch in page["data"]:
                ended = await self._until_ended("a batch", f"/v1/batches/{batch['id']}")
                file = f"/v1/files/{ended.get('output_file_id')}"
                if (await self._request("a batch, file", "GET", file, 200, 404)).status == 200:
                    await self._check_batch(ended, ended["request_counts"]["total"])
            if not page["has_more"]:
                return
            path = f"/v1/batches?limit=100&after={page['last_id']}"

    async def run_tools(self) -> None:
        """Have the server run tools. What it says is not compared: it depends on the files."""
        run = {"tools": ["read_file"], "approval": "all", "max_steps": 2}
        body = catalogue.chat_body(self.source) | {"stream": True, "trioserve_run_tools": run}
        for name in ("tools", "n", "response_format"):
            body.pop(name, None)
        data, head = catalogue.request("POST", CHATS, body)
        ask = _ask("a run of tools", data, head, 200, 429)
        await self._patiently(attrs.evolve(ask, end=b"[DONE]"))

    # -- how

    def _choice(self, path: str = "") -> Quiet:
        return self.source.choice([one for one in self.quiet if path in ("", one.path)])

    async def _until_ended(self, name: str, path: str) -> dict[str, Any]:
        while True:
            answer = await self._request(f"{name}, poll", "GET", path, 200)
            found: dict[str, Any] = json.loads(answer.body)
            if found.get("status") in _ENDED:
                return found
            await trio.sleep(_POLL)

    async def _post(
        self, name: str, path: str, body: Mapping[str, Any], *allowed: int
    ) -> ResponseReader:
        return await self._request(name, "POST", path, *allowed, body=body)

    async def _request(
        self, name: str, method: str, path: str, *allowed: int, body: object = None
    ) -> ResponseReader:
        more = ["Content-Type: multipart/form-data; boundary=x"] if isinstance(body, bytes) else []
        data, head = catalogue.request(method, path, body, *more)
        return await self._patiently(_ask(f"checked: {name}", data, head, *allowed))

    async def _patiently(self, ask: Ask) -> ResponseReader:
        """Ask again while the queue is full, for some time."""
        for _ in range(_TRIES):
            answer = await self.ask_alone(ask)
            if answer.status != 429:
                break
            await trio.sleep(self.source.uniform(0.2, 1))
        return answer

    def _compare(self, name: str, one: Quiet, answer: Any) -> None:
        if answer == one.answer:
            self.tally.note("compared", "equal")
        else:
            self._differs(name, one, answer)

    def _differs(self, name: str, one: Quiet, answer: Any) -> None:
        self.tally.note("compared", "different")
        self.tally.fault(
            f"{name} differs: {answer!r}, not {one.answer!r}, to {one.path} {dict(one.body)}"
        )

    @property
    def acts(self) -> Sequence[Act]:
        """Its work, and the number of times."""
        kind = type(self)
        mine = ((kind.ask, 30), (kind.stream, 30), (kind.run_in_background, 16), (kind.keep, 10),
                (kind.run_batch, 8), (kind.run_tools, 6))  # fmt: skip
        return (*ACTS, *mine)


def _form(lines: Sequence[tuple[str, Quiet]]) -> bytes:
    """The upload of a batch."""
    written = (
        {"custom_id": id_, "method": "POST", "url": one.path, "body": one.body}
        for id_, one in lines
    )
    content = "\n".join(map(json.dumps, written))
    return (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        'Content-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        f"{content}\r\n--x--\r\n"
    ).encode()
