"""`get_logger`: loggers that are quiet in a program that configures no logging."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

#: Without a configuration, structlog would write everything to standard output.
_QUIET: Any = structlog.make_filtering_bound_logger(logging.WARNING)


def get_logger(*names: str) -> structlog.stdlib.BoundLogger:
    """Make a logger that follows the configuration of structlog; see `structlog.get_logger`.

    Until the program configures structlog, it writes warnings and errors to standard error.
    """
    wrapper: Any = _wrapped
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        None, wrapper_class=wrapper, logger_factory_args=names
    )
    return logger


def _wrapped(logger: Any, **parts: Any) -> Any:
    if structlog.is_configured():
        return structlog.get_config()["wrapper_class"](logger, **parts)
    return _QUIET(structlog.PrintLogger(sys.stderr), **parts)


def request_id() -> str:
    """The id of the request that the current task works for, which its log lines carry."""
    return str(structlog.contextvars.get_contextvars().get("request_id", "-"))
