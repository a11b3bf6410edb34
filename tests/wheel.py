"""Builds the wheel and the sdist, checks both, and chats with the wheel in new environments.

    python -m tests.wheel python3.11 python3.12

Each environment has the wheel and its dependencies, and no extra. A Python that is not installed is
left out; without any, the program fails.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_BYTES = 12_000_000

#: Chats in a program, then over HTTP from the command.
CHAT = """
import http.client, json, os, signal, socket, subprocess, sys, time
import trio, trioserve

MESSAGES = [{"role": "user", "content": "Count from 1 to 3"}]

async def main():
    async with trioserve.Server() as server:
        completion = await server.chat(MESSAGES)
        assert completion.message.content, completion

trio.run(main)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
started = time.monotonic()
answer = {}
command = [os.path.join(os.path.dirname(sys.executable), "trioserve"), "--port", str(port)]
with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
    while server.poll() is None:
        client = http.client.HTTPConnection("127.0.0.1", port)
        try:
            client.request("POST", "/v1/chat/completions", json.dumps({"messages": MESSAGES}))
            answer = json.loads(client.getresponse().read())
        except ConnectionError:
            time.sleep(0.05)
            continue
        if "choices" in answer or time.monotonic() > started + 300:
            break
        time.sleep(0.05)
    server.send_signal(signal.SIGINT)
    assert "choices" in answer and answer["choices"][0]["message"]["content"], answer
    print(f"first answer over HTTP after {time.monotonic() - started:.1f} s")
"""


def main() -> None:
    pythons = [found for name in sys.argv[1:] if (found := _python(name))]
    if not pythons:
        sys.exit(f"None of {', '.join(sys.argv[1:])} is installed.")
    with tempfile.TemporaryDirectory() as folder:
        dist = Path(folder, "dist")
        _run(sys.executable, "-m", "hatchling", "build", "-d", dist)
        (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        _check(wheel, sdist)
        for python in pythons:
            _chat(python, wheel, Path(folder, python.name))


def _python(name: str) -> Path | None:
    """Return the path of a Python, or None where it cannot run."""
    found = shutil.which(name)
    if (
        found is None
        or subprocess.run([found, "-c", "import venv"], capture_output=True).returncode
    ):
        print(f"{name} is not installed")
        return None
    return Path(found)


def _check(wheel: Path, sdist: Path) -> None:
    for file in (wheel, sdist):
        size = file.stat().st_size
        assert size < MAX_BYTES, f"{file.name} has {size} bytes"
        print(f"{file.name}: {size / 1e6:.1f} MB")
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("trioserve/", "trioserve-")) for name in names)
    assert any(name.endswith("ui/dist/index.html") for name in names)
    assert any(name.endswith("/share/man/man1/trioserve-run.1") for name in names)
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/wheel.py", "docs/index.md"} <= inside
    for tool, *rest in (
        ("twine", "check", "--strict", wheel, sdist),
        ("check_wheel_contents", wheel),
    ):
        _run(sys.executable, "-m", tool, *rest)


def _chat(python: Path, wheel: Path, folder: Path) -> None:
    _run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    started = time.monotonic()
    _run(inside, "-m", "pip", "install", "-qq", "--disable-pip-version-check", wheel)
    installed = time.monotonic()
    listed = _run(inside, "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
    packages = {one["name"] for one in json.loads(listed)} - {"pip", "setuptools"}
    print(f"{python.name}: {len(packages)} packages in {installed - started:.1f} s")
    print(f"{python.name}: {_run(inside, '-W', 'error', '-c', CHAT).strip()}", flush=True)


def _run(*command: object) -> str:
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, command[:4]))} ended with {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )
    return done.stdout


if __name__ == "__main__":
    main()
