"""The public names: all there, all typed and documented, and loaded only when used."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import trioserve
from trioserve import errors


def test_the_version_is_that_of_the_distribution() -> None:
    assert trioserve.__version__ == version("trioserve")


@pytest.mark.parametrize("name", trioserve.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(trioserve, name) is not None
    assert name in dir(trioserve)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = trioserve.nothing_like_this


def test_every_error_is_public() -> None:
    own = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.TrioServeError)
    }
    assert own <= set(trioserve.__all__)


@pytest.mark.parametrize("name", [name for name in trioserve.__all__ if name[0] != "_"])
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(trioserve, name)
    if not inspect.isclass(value):
        return  # a union of types
    assert value.__doc__, name
    for member, function in vars(value).items():
        if member[0] != "_" and inspect.isfunction(function):
            assert function.__doc__, f"{name}.{member}"
            assert "return" in function.__annotations__, f"{name}.{member}"


def test_importing_is_cheap() -> None:
    code = (
        "import sys, trioserve; heavy = {'trio', 'quart', 'hypercorn', 'llama_cpp', 'numpy'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_it_is_marked_as_typed() -> None:
    assert Path(trioserve.__file__).with_name("py.typed").exists()
