"""A model with two replicas on a Ray cluster: ``serve run examples.ray_serve:app``.

Or, without a cluster: ``python -m examples.ray_serve`` starts Ray on this machine, and asks.
"""

from __future__ import annotations

import json
import urllib.request

from ray import serve

from trioserve.ray import build

app = build(
    {
        # In place of the bundled model: "qwen": {"model": "/models/qwen.gguf", "ctx-size": 8192}
        "bundled": {
            "ctx-size": 2048,
            "parallel": 2,
            "threads": 1,
            "deployment": {"ray_actor_options": {"num_cpus": 0.5}},
        },
    },
    replicas=2,
)


def ask(text: str) -> str:
    body = {"model": "bundled", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        message: str = json.load(answer)["choices"][0]["message"]["content"]
    return message


if __name__ == "__main__":
    serve.run(app)
    print(ask("Say hello"))
    serve.shutdown()
