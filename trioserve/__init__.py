"""trioserve: an LLM server on Trio, with llama.cpp underneath.

    async with trioserve.Server() as server:
        completion = await server.chat([{"role": "user", "content": "Say hello"}])

The public names stand in ``__init__.pyi``. Each is loaded when it is first used, so that importing
trioserve is cheap, and llama.cpp is not loaded before a model is.
"""

import lazy_loader

from trioserve.renamed import renamed_names

_RENAMED = {"Options": "GenerationParams", "Run": "AgentRun", "TickRecord": "StepRecord"}

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = renamed_names(__name__, _RENAMED, _load)
