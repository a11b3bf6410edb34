"""Helpers for tests of programs that use trioserve, such as a backend that follows a script.

`ScriptedBackend` takes the place of a model: no file, no llama.cpp, the same output each time.
`ScriptedProjector` gives it eyes and ears.
`ticking` runs an engine on the event loop itself, so that a `trio.testing.MockClock` is in
charge of all the time there is.
"""

from trioserve.testing.backend import ScriptedBackend
from trioserve.testing.driver import ticking
from trioserve.testing.loader import scripted
from trioserve.testing.projector import ScriptedProjector
from trioserve.testing.vocab import byte_vocab

__all__ = ["ScriptedBackend", "ScriptedProjector", "byte_vocab", "scripted", "ticking"]
