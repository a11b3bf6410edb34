"""The extras of the distribution: optional packages, and the features that need them."""

from __future__ import annotations

import importlib.util

#: The modules that each extra of pyproject.toml installs. A test compares the two.
EXTRAS = {
    "mcp": ("mcp",),
    "media": ("av", "PIL"),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "pdf": ("pypdfium2", "av", "PIL"),
    "ray": ("ray",),
    "speech": ("sentencex", "av", "PIL"),
    "tools": ("re2", "pathspec"),
    "web": ("trafilatura",),
    "whisper": ("faster_whisper",),
}


def has_extra(name: str) -> bool:
    """Find all modules of an extra, without importing them."""
    return all(map(_is_installed, EXTRAS[name]))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains it is missing, too
        return False
