"""Helpers for tests of programs that use trioserve, such as a backend that follows a script.

`ScriptedBackend` takes the place of a model: no file, no llama.cpp, the same output each time.
`ScriptedProjector` gives it eyes and ears.
`stepping` runs an engine on the event loop itself, so that a `trio.testing.MockClock` is in
charge of all the time there is.
"""

from typing import TYPE_CHECKING

from trioserve.renamed import renamed_names
from trioserve.testing.backend import ScriptedBackend
from trioserve.testing.driver import stepping
from trioserve.testing.loader import scripted
from trioserve.testing.projector import ScriptedProjector
from trioserve.testing.vocab import byte_vocab

__all__ = ["ScriptedBackend", "ScriptedProjector", "byte_vocab", "scripted", "stepping"]

if not TYPE_CHECKING:
    __getattr__ = renamed_names(__name__, {"ticking": "stepping"})
