"""`OperationOptions`: what may be looked at and changed in a server that runs.

They are a part of `trioserve.config.Config`. The names are llama-server's.
"""

from __future__ import annotations

import math
from pathlib import Path

import attrs

from trioserve.config.option import option
from trioserve.errors import ConfigError


@attrs.frozen(kw_only=True, slots=False)  # `Config` has several such bases
class OperationOptions:
    """LoRA adapters, files of slots, metrics.

    Raises:
        ConfigError: a directory is not there, or a scale is no number.
    """

    lora: tuple[str, ...] = option(
        (),
        "--lora",
        group="Model",
        help="LoRA adapters, each PATH or PATH:SCALE, separated by commas; the scale is 1 if none "
        "is given",
    )
    lora_init_without_apply: bool = option(
        False,
        "--lora-init-without-apply",
        group="Model",
        off=(),
        help="begin with all adapters switched off, until POST /lora-adapters or a request "
        "gives them a scale",
    )
    slot_save_path: str | None = option(
        None,
        "--slot-save-path",
        group="Server",
        help="directory for the files of POST /slots; none: there are no such files",
    )
    metrics_endpoint: bool = option(
        False,
        "--metrics",
        group="Server",
        env="LLAMA_ARG_ENDPOINT_METRICS",
        off=(),
        help="serve GET /metrics, for Prometheus",
    )
    props_endpoint: bool = option(
        False,
        "--props",
        group="Server",
        env="LLAMA_ARG_ENDPOINT_PROPS",
        off=(),
        help="serve POST /props, which changes nothing yet",
    )

    @property
    def lora_files(self) -> tuple[tuple[str, float], ...]:
        """The adapters: path and scale of each."""
        applied = 0.0 if self.lora_init_without_apply else 1.0
        return tuple((path, scale * applied) for path, scale in map(_scaled, self.lora))

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be used. Raises ConfigError."""
        for path, scale in self.lora_files:
            if not path or not math.isfinite(scale):
                raise ConfigError("lora must be the path of a file, or PATH:SCALE")
        if self.slot_save_path is not None and not Path(self.slot_save_path).is_dir():
            raise ConfigError(f"slot_save_path is {self.slot_save_path!r}, and is no directory")


def _scaled(text: str) -> tuple[str, float]:
    """Take the scale off, where there is one. A path may hold a colon, too."""
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0
