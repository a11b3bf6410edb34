"""Install the programs: ``python -m tests.programs.install FOLDER [NAME ...]``.

Each goes into a separate folder. If a registry does not have one, the folder has the reason, and
its tests are skipped with it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.programs.catalogue import NODE, PROGRAMS, Program

#: In the folder of a program: its packages once they are installed, or why they are not.
STAMP, REASON = "installed.txt", "failed.txt"

#: Seconds that one program may take.
_PATIENCE = 900


def install(name: str, program: Program, folder: Path) -> str:
    """Install a program, unless these versions are there. Returns why it failed, or nothing."""
    stamp, wanted = folder / STAMP, "\n".join(program.packages)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"installing {name}", flush=True)
    reason = _install_npm(program, folder) if program.npm else _install_pypi(program, folder)
    path = folder / REASON if reason else stamp
    path.write_text(reason or wanted, encoding="utf-8")
    return reason


def _install_npm(program: Program, folder: Path) -> str:
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    # Without this file, npm looks for one in the folders above.
    (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
    flags = ["--no-audit", "--no-fund", "--no-update-notifier"]
    return _run([npm, "install", *flags, "--loglevel=error", *program.npm], folder)


def _install_pypi(program: Program, folder: Path) -> str:
    uv, python = shutil.which("uv"), str(folder / "bin" / "python")
    venv.create(folder, with_pip=uv is None)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    command = pip if uv is None else [uv, "pip", "install", "--python", python]
    return _run([*command, "--quiet", *program.pypi], folder)


def _run(command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not installed within {_PATIENCE} seconds"
    if done.returncode == 0:
        return ""
    words = ("cause:", "ERROR:", "npm error", "error:")
    lines = done.stderr.splitlines()
    found = (line for word in words for line in lines if word in line)
    return next(found, "no reason given").strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code does not tell of programs that cannot be installed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.install", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the programs are kept")
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS], help="by default all")
    arguments = parser.parse_args(argv)
    chosen = {name: PROGRAMS[name] for name in arguments.names or PROGRAMS}
    for name, program in {"node": NODE, **chosen}.items():
        if reason := install(name, program, arguments.folder.resolve() / name):
            print(f"{name} cannot be installed: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
