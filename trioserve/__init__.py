"""trioserve: an LLM server on Trio, with llama.cpp underneath.

    async with trioserve.Server() as server:
        completion = await server.chat([{"role": "user", "content": "Say hello"}])

The public names stand in ``__init__.pyi``. Each is loaded when it is first used, so that importing
trioserve is cheap, and llama.cpp is not loaded before a model is.
"""


def _modules() -> dict[str, str]:
    """The submodule of each public name."""
    import ast
    import pathlib

    return {
        name.name: f"{__name__}.{node.module}"
        for node in ast.parse(pathlib.Path(__file__).with_suffix(".pyi").read_bytes()).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }


def __getattr__(name: str) -> object:
    import importlib

    modules = _modules()
    if name == "__all__":
        return sorted(modules)
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(modules[name]), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
