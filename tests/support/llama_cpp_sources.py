"""Gets the models folder of llama.cpp's sources: vocabularies and chat templates, for tests.

    export LLAMA_CPP_SDIST=$(python -m tests.support.llama_cpp_sources)

It comes from the sdist of llama-cpp-python, in the version that is installed, which pip downloads
(77 MB). What the tests need of it (100 MB) is kept in the user's folder for caches.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

_PACKAGE = "llama-cpp-python"


def sources() -> Path:
    """Return the folder with the sources of the installed version. Downloads it if missing.

    Raises:
        subprocess.CalledProcessError: pip failed, and printed the reason.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trioserve"
    folder = cache / f"{_PACKAGE}-{version(_PACKAGE)}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _download(Path(made))
            Path(made, "kept").rename(folder)
    return folder


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", _PACKAGE, "--dest", str(folder)]
    subprocess.run([*command, f"{_PACKAGE}=={version(_PACKAGE)}"], check=True, stdout=sys.stderr)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        members = [each for each in tar if "/vendor/llama.cpp/models/" in each.name]
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda one, _: one)
        tar.extractall(folder / "kept", members)


if __name__ == "__main__":
    print(sources())
