"""A model inside a Trio program, without HTTP: ``python examples/program.py``."""

from __future__ import annotations

import trio

from trioserve import Config, Server
from trioserve.config import logs


async def ask(server: Server, question: str) -> None:
    answer = await server.chat([{"role": "user", "content": question}], temperature=0.0)
    print(f"{question}  {answer.message.content}")


async def main() -> None:
    config = Config(parallel=4, log_level="warning")
    logs.configure(config)
    async with Server(config) as server:
        # Several at the same time share each step of the engine.
        async with trio.open_nursery() as nursery:
            for question in ("Say hello", "What is the capital of France?", "What is 2 + 3?"):
                nursery.start_soon(ask, server, question)

        # Any cancel scope around a call cancels the work in the engine.
        print("Half a second of a story:  ", end="")
        with trio.move_on_after(0.5):
            story = [{"role": "user", "content": "Tell me a long story."}]
            async with server.stream_chat(story) as stream:
                async for text in stream.text():
                    print(text, end="", flush=True)
        status = await server.status()
        print("\nSlots:", [slot.state for slot in status.slots])


if __name__ == "__main__":
    trio.run(main)
