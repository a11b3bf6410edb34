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


def test_public_names_are_there() -> None:
    for name in trioserve.__all__:
        assert getattr(trioserve, name) is not None
    assert set(trioserve.__all__) <= set(dir(trioserve))


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


def test_public_names_are_documented() -> None:
    for name in trioserve.__all__:
        value = getattr(trioserve, name)
        if name[0] == "_" or not inspect.isclass(value):
            continue  # a union of types
        assert value.__doc__, name
        for member, function in vars(value).items():
            if member[0] != "_" and inspect.isfunction(function):
                assert function.__doc__, f"{name}.{member}"
                assert "return" in function.__annotations__, f"{name}.{member}"


@pytest.mark.system
def test_importing_is_cheap() -> None:
    code = (
        "import sys, trioserve; heavy = {'trio', 'quart', 'hypercorn', 'llama_cpp', 'numpy'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_it_is_marked_as_typed() -> None:
    assert Path(trioserve.__file__).with_name("py.typed").exists()
