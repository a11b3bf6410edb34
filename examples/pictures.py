"""What a model sees: ``python examples/pictures.py model.gguf mmproj.gguf cat.png dog.jpg``.

Its second argument is the projector, which comes with models that take images.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from trioserve import Config, Image, Server, TrioServeError
from trioserve.config import logs


async def describe(server: Server, path: Path) -> None:
    # An image that was asked about before, here or in another chat, is not computed again.
    question = {"type": "text", "text": "What is in this picture? Answer in one sentence."}
    messages = [{"role": "user", "content": [Image(path), question]}]
    try:
        answer = await server.chat(messages, max_tokens=100, temperature=0.0)
    except TrioServeError as error:
        print(f"{path.name}: {error}")
    else:
        print(f"{path.name} ({len(answer.prompt)} tokens): {answer.message.content}")


async def main(model: str, projector: str, *paths: str) -> None:
    config = Config(model=model, mmproj=projector, parallel=2, log_level="warning")
    logs.configure(config)
    async with Server(config) as server, trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(describe, server, Path(path))


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
