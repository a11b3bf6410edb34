"""The text of an answer, whole or streamed, without ids, times and counts."""

from __future__ import annotations

import json
from typing import Any


def said(answer: dict[str, Any]) -> Any:
    """The text of a whole answer of any vendor."""
    if "choices" in answer:
        return [_said_by_choice(choice) for choice in answer["choices"]]
    if "output" in answer:
        details = answer["incomplete_details"]
        return [answer["status"], details, [_said_by_item(item) for item in answer["output"]]]
    return [answer.get("content", answer), answer.get("stop_reason"), answer.get("stop_type")]


def _said_by_choice(choice: dict[str, Any]) -> Any:
    message = choice.get("message", {"content": choice.get("text")})
    calls = [_function(call["function"]) for call in message.get("tool_calls") or ()]
    reasoning = message.get("reasoning_content") or ""
    return [reasoning, message.get("content") or "", calls, choice["finish_reason"]]


def _function(function: dict[str, Any]) -> Any:
    return [function.get("name"), function.get("arguments")]


def _said_by_item(item: dict[str, Any]) -> Any:
    texts = [part.get("text") for part in item.get("content") or ()]
    return [item["type"], item.get("name"), item.get("arguments"), item.get("output"), texts]


def said_in_stream(body: bytes) -> Any:
    """The text of a whole stream, as `said` has it."""
    events = _events(body)
    if events and (response := events[-1].get("response")) is not None:
        return said(response)
    if events and events[0].get("type") == "message_start":
        return _said_by_blocks(events)
    if events and "content" in events[0]:
        text = "".join(event["content"] for event in events)
        return [text, None, events[-1].get("stop_type")]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices", ()):
            _add(choices.setdefault(choice["index"], _no_choice()), choice)
    return [_said_by_choice(choice) for _, choice in sorted(choices.items())]


def has_begun_as(body: bytes, answer: Any) -> bool:
    """True if the text of a stream so far is the beginning of an answer."""
    events = _events(body.rpartition(b"\n\n")[0])
    if not events:
        return True
    if "content" in events[0]:
        return str(answer[0]).startswith("".join(event["content"] for event in events))
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            text = choice.get("text", choice.get("delta", {}).get("content"))
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
    return all(str(answer[index][1]).startswith(text) for index, text in texts.items())


def _events(body: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def _no_choice() -> dict[str, Any]:
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    return {"message": message, "finish_reason": None}


def _add(choice: dict[str, Any], more: dict[str, Any]) -> None:
    message, delta = choice["message"], more.get("delta", {"content": more.get("text")})
    for name in ("content", "reasoning_content"):
        message[name] += delta.get(name) or ""
    for call in delta.get("tool_calls") or ():
        if call["index"] == len(message["tool_calls"]):
            message["tool_calls"].append({"function": {"name": None, "arguments": ""}})
        function = message["tool_calls"][call["index"]]["function"]
        function["name"] = call["function"].get("name") or function["name"]
        function["arguments"] += call["function"].get("arguments") or ""
    choice["finish_reason"] = more.get("finish_reason") or choice["finish_reason"]


def _said_by_blocks(events: list[dict[str, Any]]) -> Any:
    blocks: list[dict[str, Any]] = []
    reason, written = None, ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
                written = ""
            case "content_block_delta":
                delta = event["delta"]
                written += delta.get("partial_json", "")
                for name in {"text", "thinking"} & delta.keys():
                    blocks[-1][name] += delta[name]
            case "content_block_stop" if written:
                blocks[-1]["input"] = json.loads(written)
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    return [blocks, reason, None]
