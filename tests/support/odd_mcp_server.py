"""An MCP server that behaves as oddly as its first argument says. It needs nothing but Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
FILE = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(os.devnull)

ANY_OBJECT = {"type": "object", "properties": {}}
_lock = threading.Lock()


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"The tool {name}", "inputSchema": ANY_OBJECT, **fields}


TOOLS = [
    tool("echo", annotations={"readOnlyHint": True}),
    tool("sleep"),
    tool("block"),
    tool("die"),
    tool("die_once", annotations={"readOnlyHint": True}),
    tool("content"),
    tool("environment"),
    tool("ask"),
    tool("flood"),
    tool("endless"),
    tool("progress"),
    tool("more"),
    tool("seen"),
    tool("say"),
]

_cancelled: set[Any] = set()
_seen: list[str] = []
_answers: dict[Any, Any] = {}


def write(data: bytes) -> None:
    with _lock:
        while data:
            data = data[os.write(1, data) :]


def send(message: dict[str, Any]) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}], **fields}


def listed(params: dict[str, Any]) -> dict[str, Any]:
    if MODE == "many":
        start = int(params.get("cursor") or 0)
        page = [tool(f"tool{i}") for i in range(start, start + 500)]
        return {"tools": page, "nextCursor": str(start + 500) if start < 9500 else None}
    if MODE == "endless pages":
        return {"tools": [], "nextCursor": "again"}
    if MODE == "nonsense":
        return {
            "tools": [
                tool("good"),
                tool("no schema", inputSchema=None),
                tool(
                    "wrong", inputSchema={"type": "object", "properties": {"a": {"type": "text"}}}
                ),
                tool("list", inputSchema=[1]),
                tool("deep", inputSchema=deep(200)),
                tool("long", inputSchema={"type": "object", "description": "x" * 100_000}),
                {"description": "no name"},
                tool("task", execution={"taskSupport": "required"}),
                "no tool",
                tool("half \ud800 pair"),
            ]
        }
    if MODE == "hidden" and not FILE.exists():
        return {"tools": [tool("more")]}
    return {"tools": TOOLS}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def call(name: str, arguments: dict[str, Any], id: Any, params: dict[str, Any]) -> Any:
    match name:
        case "echo":
            return text(str(arguments.get("text", "")))
        case "say":
            write(
                arguments["line"].encode("utf-8", "surrogatepass").replace(b"ID", str(id).encode())
            )
            return None
        case "sleep":  # as an asynchronous server does it, that can be cancelled
            end = time.monotonic() + arguments["seconds"]
            while time.monotonic() < end and id not in _cancelled:
                time.sleep(0.002)
            return None if id in _cancelled else text("slept")
        case "die":
            os.write(2, b"the last words\n")
            os._exit(3)
        case "die_once":
            if not FILE.exists():
                FILE.touch()
                os._exit(3)
            return text("alive")
        case "content":
            return arguments["result"]
        case "environment":
            return text(json.dumps({"cwd": os.getcwd(), "env": dict(os.environ)}))
        case "ask":
            send({"id": "question", "method": arguments["method"], "params": arguments["params"]})
            while "question" not in _answers:
                time.sleep(0.002)
            return text(json.dumps(_answers.pop("question")))
        case "flood":
            for i in range(arguments["n"]):
                send({"method": "notifications/message", "params": {"level": "info", "data": i}})
            return text("dry")
        case "endless":
            while True:
                write(b"x" * 2**16)
        case "progress":
            token = params["_meta"]["progressToken"]
            for i in range(arguments["n"]):
                time.sleep(arguments["seconds"])
                done = {"progressToken": token, "progress": i + 1, "message": f"step {i + 1}"}
                send({"method": "notifications/progress", "params": done})
            return text("done")
        case "more":
            FILE.touch()
            send({"method": "notifications/tools/list_changed"})
            return text("there are more")
        case "seen":
            return text(json.dumps(_seen))
    raise KeyError(name)


def answer(request: dict[str, Any]) -> None:
    id, params = request["id"], request.get("params") or {}
    try:
        match request["method"]:
            case "initialize":
                version = {"old": "1999-01-01", "new": "2025-11-25"}.get(MODE, "2024-11-05")
                send({"id": id, "result": {
                    "protocolVersion": version,
                    "capabilities": {"tools": {"listChanged": True}},
                    "serverInfo": {"name": "odd", "version": "1"},
                }})  # fmt: skip
            case "tools/list":
                send({"id": id, "result": listed(params)})
            case "tools/call":
                result = call(params["name"], params.get("arguments") or {}, id, params)
                if result is not None:
                    send({"id": id, "result": result})
            case "ping":
                send({"id": id, "result": {}})
            case method:
                send({"id": id, "error": {"code": -32601, "message": f"no {method}"}})
    except Exception as error:
        send({"id": id, "error": {"code": -32000, "message": str(error)}})


def main() -> None:
    match MODE:
        case "gone":
            sys.exit("no licence")
        case "silent":
            time.sleep(1000)
        case "grandchild":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        case "chatty":
            print("Server running on stdio", flush=True)
            sys.stderr.write("x" * 300_000)
        case "forks":
            if os.fork():
                os._exit(0)
            time.sleep(5)  # it is to be ended before it answers, however busy the machine is
        case "fails once":
            if not FILE.exists():
                FILE.touch()
                sys.exit("not yet")
        case "log":
            with FILE.open("a") as file:
                file.write(f"{os.getpid()}\n")
    for line in sys.stdin:
        message = json.loads(line)
        _seen.append(message.get("method", "an answer"))
        if message.get("method") == "notifications/cancelled":
            _cancelled.add(message["params"]["requestId"])
        elif "method" not in message:
            _answers[message["id"]] = message.get("error") or message.get("result")
        elif "id" in message:
            if (message.get("params") or {}).get("name") == "block":
                time.sleep(message["params"]["arguments"]["seconds"])  # hears nothing meanwhile
            if message["method"] == "tools/call":
                threading.Thread(target=answer, args=(message,), daemon=True).start()
            else:
                answer(message)


if __name__ == "__main__":
    main()
