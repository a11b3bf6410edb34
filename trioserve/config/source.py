"""`SourceConfig`: which model, and where its file comes from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import attrs

from trioserve.config.option import option
from trioserve.errors import ConfigError

_model = partial(option, group="Model")


def _check_source(config: SourceConfig) -> None:
    if config.hf_repo is not None and (config.model or config.model_url) is not None:
        raise ConfigError("hf_repo names a model, so model and model_url cannot do it, too")
    if config.hf_file is not None and config.hf_repo is None:
        raise ConfigError("hf_file has no effect without hf_repo")


# fmt: off


@attrs.frozen(kw_only=True)
class SourceConfig:
    """Where the model is. Names are llama-server's.

    Raises:
        ConfigError: a value cannot be used; the message names the field.
    """

    #: Run in their order when an object is made.
    CHECKS: ClassVar[tuple[Callable[[Any], None], ...]] = (_check_source,)

    model: str | None = _model(None, "-m --model LLAMA_ARG_MODEL",
        help="path of a GGUF file, or a model on the hub, as for --hf-repo; without it, the "
        "bundled model is served")
    hf_repo: str | None = _model(None, "-hf -hfr --hf-repo LLAMA_ARG_HF_REPO",
        help="model on the hub (Hugging Face), as USER/REPO or USER/REPO:QUANT, which is "
        "downloaded unless it is in the cache; without QUANT it is Q4_K_M, else Q8_0, else the "
        "first")
    hf_file: str | None = _model(None, "-hff --hf-file LLAMA_ARG_HF_FILE",
        help="file of that repository to take, whatever QUANT is")
    hf_token: str | None = _model(None, "-hft --hf-token HF_TOKEN",
        help="token that shows the hub who asks; by default the one of hf auth login")
    model_url: str | None = _model(None, "-mu --model-url LLAMA_ARG_MODEL_URL",
        help="address of a GGUF file to download, unless it is in the cache and has not changed; "
        "with --model, to that path")
    offline: bool = _model(False, "--offline LLAMA_ARG_OFFLINE",
        help="download nothing, and take only what is in the cache")
    # fmt: on

    @property
    def model_named(self) -> str | None:
        """What names the model, whichever field does; None: the bundled model is meant."""
        return self.hf_repo or self.model_url or self.model
