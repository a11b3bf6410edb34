"""A router that starts tiny children in one way or the other, and then waits to be killed."""

from __future__ import annotations

import json
import os
import sys

import trio

from tests.support import tiny


async def main(way: str) -> None:
    async with tiny.launcher(way) as launcher:
        told = []
        for argv in ([], ["hang"]):
            process = await launcher.launch(argv)
            told.append((await tiny.info_of(process))["pid"])
        os.write(1, json.dumps(told).encode() + b"\n")
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
