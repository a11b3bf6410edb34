"""Times the first token of a chat's next turn: nothing cached, from RAM, from disk, after a kill.

Run as ``python -m benchmarks.disk_cache MODEL [--tokens 4000] [--rounds 3]``. Each round prefills
another text in a process that is killed at the end, and continues in a new process. With `--cpu`,
the times are CPU times of one thread for the model, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic, process_time, sleep

from trioserve import llama
from trioserve.config import Config
from trioserve.engine import DecodeMaximal, DiskCache, Engine
from trioserve.llama.backend import LlamaBackend
from trioserve.types import Chunk, GenerationParams, Prompt, SamplingParams, Task
from trioserve.types.events import Chunks

#: Tokens of an answer, and of the question that follows it.
ANSWER, QUESTION = 8, 40


class Chat:
    """An engine that is stepped in this thread."""

    def __init__(self, model: str, folder: Path, n_tokens: int, seed: int, *, cpu: bool) -> None:
        n_ctx, threads = 2 * n_tokens + 1024, 1 if cpu else -1
        self.clock = process_time if cpu else monotonic
        self.backend = llama.load(Config(model=model, ctx_size=n_ctx, parallel=2, threads=threads))
        assert isinstance(self.backend, LlamaBackend)
        disk = DiskCache(folder, 2**34, self.backend.state_identity, cuttable=self.backend.cuttable)
        self.engine = Engine(
            self.backend, DecodeMaximal(), lambda: None, cache_ram=2**31, disk=disk
        )
        self.engine.start_helpers()
        rng = Random(seed)
        n_vocab = self.backend.vocab.n_tokens
        self.first = [rng.randrange(n_vocab // 2, n_vocab) for _ in range(n_tokens)]
        self.question = [rng.randrange(n_vocab // 2, n_vocab) for _ in range(QUESTION)]
        self.n_tasks = 0

    def ask(self, tokens: list[int], *, cache_prompt: bool = True) -> tuple[float, list[int], int]:
        """Return the seconds to the first token, the tokens, and how many were cached."""
        self.n_tasks += 1
        params = GenerationParams(
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=ANSWER,
            cache_prompt=cache_prompt,
        )
        began, first = self.clock(), 0.0
        answer: list[int] = []
        self.engine.submit(Task(self.n_tasks, Prompt(tokens), params))
        while True:
            self.engine.step(wait=True)
            for event in self.engine.take():
                for one in event if isinstance(event, Chunks) else [event]:
                    if isinstance(one, Chunk):
                        first = first or self.clock() - began
                        answer += one.tokens
                    elif hasattr(one, "timings"):
                        return first, answer, one.timings.cache_n

    def write(self) -> None:
        """Wait until all of it is on disk, as when the server is idle."""
        while self.engine._tidy(is_soon=False):
            sleep(0.01)

    def forget(self, *, ram: bool) -> None:
        """Empty the KV cache, and RAM."""
        cache = self.engine._cache
        while cache.evict_one():
            pass
        if ram:
            for entry_id in list(cache.ram._entries):
                cache.ram.drop(entry_id)


def before_kill(chat: Chat) -> dict[str, float | list[int]]:
    """Measure in one process; the last turn is left on disk."""
    _, answer, _ = chat.ask(chat.first)
    turn = [*chat.first, *answer, *chat.question]
    cold, _, n_cold = chat.ask(turn, cache_prompt=False)
    chat.write()
    chat.forget(ram=False)
    from_ram, _, n_ram = chat.ask(turn)
    chat.forget(ram=True)
    from_disk, _, n_disk = chat.ask(turn)
    chat.write()
    return {
        "cold": cold,
        "RAM": from_ram,
        "disk": from_disk,
        "cached": [n_cold, n_ram, n_disk],
        "answer": answer,
    }


def run_process(chat: Chat, answer: str) -> None:
    """Be one of the processes; with an answer, the one after the kill."""
    if not answer:
        print(json.dumps(before_kill(chat)), flush=True)
        signal.pause()
    turn = [*chat.first, *json.loads(answer), *chat.question]
    seconds, _, n_cached = chat.ask(turn)
    print(json.dumps({"restart": seconds, "cached": n_cached}), flush=True)
    os._exit(0)


def run_round(model: str, n_tokens: int, seed: int, *, cpu: bool) -> dict[str, float]:
    """Run one round in two processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, model, "--tokens", str(n_tokens)]
        command += ["--folder", folder, "--seed", str(seed), *(["--cpu"] if cpu else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            seen = json.loads(process.stdout.readline())
            process.kill()
        done = subprocess.run(
            [*command, "--answer", json.dumps(seen["answer"])],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    after = json.loads(done.stdout)
    print("cached tokens", seen["cached"], after["cached"], flush=True)
    return {name: seen[name] for name in ("cold", "RAM", "disk")} | {"restart": after["restart"]}


def main() -> None:
    """Run the rounds, and print them with their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--answer", default="")
    args = parser.parse_args()
    if args.folder is not None:
        chat = Chat(args.model, args.folder, args.tokens, args.seed, cpu=args.cpu)
        run_process(chat, args.answer)
        return
    rounds = []
    for seed in range(args.rounds):
        rounds.append(run_round(args.model, args.tokens, seed, cpu=args.cpu))
        print({name: f"{1e3 * one:.0f} ms" for name, one in rounds[-1].items()}, flush=True)
    middle = {name: median(one[name] for one in rounds) for name in rounds[0]}
    for name, seconds in middle.items():
        print(f"{name:8} {1e3 * seconds:8.0f} ms  {seconds / middle['cold']:.2f} of nothing cached")


if __name__ == "__main__":
    main()
