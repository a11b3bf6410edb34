"""`LogOptions`: what is logged, where to, and in what form. A part of `trioserve.config.Config`."""

from __future__ import annotations

import attrs

from trioserve.config.option import option


@attrs.frozen(kw_only=True, slots=False)  # `Config` has several such bases
class LogOptions:
    """Options of the log."""

    log_format: str = option(
        "auto",
        "--log-format",
        group="Logs",
        env="TRIOSERVE_LOG_FORMAT",
        choices=("auto", "pretty", "json"),
        help="auto: pretty on a terminal, JSON otherwise",
    )
    log_level: str = option(
        "info",
        "--log-level",
        group="Logs",
        env="TRIOSERVE_LOG_LEVEL",
        choices=("debug", "info", "warning", "error", "off"),
        help="least level that is written; off: nothing is",
    )
    log_file: str | None = option(
        None,
        "--log-file",
        group="Logs",
        env="LLAMA_ARG_LOG_FILE",
        help="file that gets all lines too, as JSON, at its end",
    )
    log_colors: str = option(
        "auto",
        "--log-colors",
        group="Logs",
        env="LLAMA_ARG_LOG_COLORS",
        choices=("auto", "on", "off"),
        help="colours in pretty lines; auto: on a terminal",
    )
    log_prefix: bool = option(
        True,
        "--log-prefix",
        group="Logs",
        env="LLAMA_ARG_LOG_PREFIX",
        help="begin each line with its level and where it is from",
    )
    log_timestamps: bool = option(
        True,
        "--log-timestamps",
        group="Logs",
        env="LLAMA_ARG_LOG_TIMESTAMPS",
        help="begin each line with its time",
    )
