"""Two models in a Trio program, one in memory at a time: ``python examples/models.py``."""

from __future__ import annotations

import trio

from trioserve import Config, Models, Server, ServerState
from trioserve.config import logs

#: In place of the bundled model, a name may have another file: ``Config(model="llama.gguf")``.
CONFIGS = {
    "short": Config(ctx_size=512, log_level="warning"),
    # Its memory is freed after a minute idle, even if no other model needs the room.
    "long": Config(ctx_size=4096, sleep_idle_seconds=60, log_level="warning"),
}


async def ask(name: str, server: Server) -> None:
    answer = await server.chat([{"role": "user", "content": "Say hello"}], temperature=0.0)
    print(f"{name}: {answer.message.content}")


async def main() -> None:
    logs.configure(CONFIGS["short"])
    async with Models(CONFIGS, max_loaded=1) as models:
        # The second waits until the first has nothing to do, and has made room.
        async with trio.open_nursery() as nursery:
            for name, server in models.items():
                nursery.start_soon(ask, name, server)
        print(
            "In memory:", [name for name, one in models.items() if one.state is ServerState.READY]
        )


if __name__ == "__main__":
    trio.run(main)
