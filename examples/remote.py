"""A model of another server: ``python examples/remote.py http://127.0.0.1:8080``."""

from __future__ import annotations

import sys

import trio

from trioserve import RemoteServer


async def main(url: str) -> None:
    async with RemoteServer(url) as server:
        # Any cancel scope around a call cancels the work in the other server.
        with trio.move_on_after(2):
            async with server.stream_chat(
                [{"role": "user", "content": "Tell me a story."}]
            ) as answer:
                async for text in answer.text():
                    print(text, end="", flush=True)
        print("\nTokens of a word:", await server.tokenize("hello"))


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
