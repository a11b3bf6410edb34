"""Copies a llama-cpp-python that works in this Python to an environment.

    python copy_llama_cpp.py .venv

A library that the user has built, for a GPU for example, is then not built again. Prints what it
copies, and writes `.copied` into the environment. Without such a library it does nothing.
"""

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OLDEST = (0, 3, 36)


def main(environment: Path) -> None:
    """Copy the library of this Python to an environment."""
    try:
        found = distribution("llama-cpp-python")
    except PackageNotFoundError:
        return
    numbers = tuple(int(part) for part in found.version.split(".")[:3] if part.isdigit())
    code = "import llama_cpp.llama_cpp"
    if (
        numbers < OLDEST
        or subprocess.run([sys.executable, "-c", code], capture_output=True).returncode
    ):
        return
    python = environment / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('platlib'))"
    target = Path(subprocess.check_output([python, "-c", where], text=True).strip())
    for file in found.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file.locate(), target / file)
    (environment / ".copied").touch()
    print(f"Using llama-cpp-python {found.version} of {sys.executable}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
