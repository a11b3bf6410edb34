"""`DraftConfig`: speculative decoding, and the draft model for it."""

from __future__ import annotations

from functools import partial

import attrs

from trioserve.config.media import MediaConfig
from trioserve.config.option import option
from trioserve.config.readers import parse_placement
from trioserve.errors import ConfigError

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

_draft = partial(option, group="Drafts")


def _check_draft_model(config: DraftConfig) -> None:
    for text in config.spec_draft_override_tensor:
        parse_placement(text, "spec_draft_override_tensor")
    if config.spec_draft_n_min > config.spec_draft_n_max:
        raise ConfigError(f"spec_draft_n_min must be at most spec_draft_n_max, "
                          f"which is {config.spec_draft_n_max}")  # fmt: skip
    if config.spec_draft_model is not None and config.spec_draft_hf is not None:
        raise ConfigError(
            "spec_draft_hf names a draft model, so spec_draft_model cannot do it, too"
        )
    if config.has_draft_model:
        return
    for field in attrs.fields(DraftConfig):
        if field.name.startswith("spec_draft") and getattr(config, field.name) != field.default:
            raise ConfigError(f"{field.name} has no effect without spec_draft_model")


#: The types of speculative decoding that there are, and those of llama-server that there are not.
DRAFT_TYPES = ("none", "ngram-simple", "ngram-mod", "draft-simple")
_FOREIGN_DRAFT_TYPES = {
    "ngram-map-k": "ngram-simple has a map of the text, too",
    "ngram-map-k4v": "ngram-simple has a map of the text, too",
    "ngram-cache": "n-grams are learned from requests, not from files",
    "draft-eagle3": "drafts are not made from what the model computes inside",
    "draft-mtp": "drafts are not made from what the model computes inside",
    "draft-dflash": "drafts are not made from what the model computes inside",
    "draft-dspark": "drafts are not made from what the model computes inside",
}


def _check_types(config: DraftConfig) -> None:
    for name in config.spec_type:
        if name in _FOREIGN_DRAFT_TYPES:
            raise ConfigError(f"spec_type {name!r} is one of llama-server that trioserve does not "
                              f"have: {_FOREIGN_DRAFT_TYPES[name]}")  # fmt: skip
        if name not in DRAFT_TYPES:
            raise ConfigError(f"spec_type must be of {', '.join(DRAFT_TYPES)}, not {name!r}")
    if "draft-simple" in config.spec_type and not config.has_draft_model:
        raise ConfigError("spec_type 'draft-simple' needs spec_draft_model")
    if config.spec_ngram_mod_n_min > config.spec_ngram_mod_n_max:
        raise ConfigError(f"spec_ngram_mod_n_min must be at most spec_ngram_mod_n_max, "
                          f"which is {config.spec_ngram_mod_n_max}")  # fmt: skip


# fmt: off


@attrs.frozen(kw_only=True)
class DraftConfig(MediaConfig):
    """How drafts are made. Names are llama-server's.

    Raises:
        ConfigError: a value cannot be used; the message names the field.
    """

    CHECKS = (*MediaConfig.CHECKS, _check_types, _check_draft_model)

    spec_type: tuple[str, ...] = _draft(("none",), "--spec-type LLAMA_ARG_SPEC_TYPE",
        help="what to guess the next tokens from, so that one step can check several: "
        "ngram-simple = the request's own text, ngram-mod = those of earlier requests too, none = "
        "do not; several are separated by commas, and asked in this order before a draft model")
    spec_ngram_simple_size_n: int = _draft(6, "--spec-ngram-simple-size-n", min=1, max=1024,
        help="ngram-simple: number of last tokens that must have come before in the same order")
    spec_ngram_simple_size_m: int = _draft(64, "--spec-ngram-simple-size-m", min=1, max=1024,
        help="ngram-simple: maximum number of tokens to guess")
    spec_ngram_mod_n_match: int = _draft(8, "--spec-ngram-mod-n-match", min=1, max=1024,
        help="ngram-mod: number of last tokens that must have come before in the same order")
    spec_ngram_mod_n_min: int = _draft(1, "--spec-ngram-mod-n-min", min=0, max=1024,
        help="ngram-mod: minimum number of tokens to guess")
    spec_ngram_mod_n_max: int = _draft(64, "--spec-ngram-mod-n-max", min=1, max=1024,
        help="ngram-mod: maximum number of tokens to guess")
    spec_draft_model: str | None = _draft(None,
        "-md --model-draft --spec-draft-model LLAMA_ARG_SPEC_DRAFT_MODEL",
        help="path of a GGUF file with a small model of the same vocabulary, which guesses what "
        "the model says next; or a model on the hub, as for --hf-repo")
    spec_draft_hf: str | None = _draft(None,
        "--spec-draft-hf -hfd -hfrd --hf-repo-draft LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        help="such a model on the hub, as for --hf-repo")
    spec_draft_n_max: int = _draft(16,
        "--spec-draft-n-max LLAMA_ARG_SPEC_DRAFT_N_MAX", min=1, max=1024,
        help="maximum number of tokens in a draft of the draft model; most drafts are shorter, for "
        "they are as long as it pays")
    spec_draft_n_min: int = _draft(0,
        "--spec-draft-n-min LLAMA_ARG_SPEC_DRAFT_N_MIN", min=0, max=1024,
        help="minimum number of tokens in a draft of the draft model; shorter ones are not used")
    spec_draft_p_min: float = _draft(0.0,
        "--draft-p-min --spec-draft-p-min LLAMA_ARG_SPEC_DRAFT_P_MIN", min=0, max=1,
        help="a draft ends before a token that the draft model finds less probable than this")
    spec_draft_threads: int = _draft(-1,
        "-td --threads-draft --spec-draft-threads", min=-1, max=512,
        help="number of CPU threads for the draft model; -1 = the same as --threads, 0 = one for "
        "each logical CPU")
    spec_draft_threads_batch: int = _draft(-1,
        "-tbd --threads-batch-draft --spec-draft-threads-batch", min=-1, max=512,
        help="number of CPU threads for prompts in the draft model; -1 = the same as "
        "--threads-draft, or without it as --threads-batch")
    spec_draft_type_k: str = _draft("f16",
        "-ctkd --cache-type-k-draft --spec-draft-type-k LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        choices=CACHE_TYPES, help="data type of the keys in the draft model's KV cache")
    spec_draft_type_v: str = _draft("f16",
        "-ctvd --cache-type-v-draft --spec-draft-type-v LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        choices=CACHE_TYPES, help="data type of the values in the draft model's KV cache")
    spec_draft_ngl: int = _draft(-1,
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl "
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT", min=-1,
        help="number of the draft model's layers to keep on the GPU; -1 = all")
    spec_draft_device: tuple[str, ...] = _draft((), "-devd --device-draft --spec-draft-device",
        help="devices to compute the draft model on, separated by commas; none = the CPU only; by "
        "default those of --device")
    spec_draft_override_tensor: tuple[str, ...] = _draft((),
        "-otd --override-tensor-draft --spec-draft-override-tensor",
        help="where to keep tensors of the draft model whose names match, as PATTERN=BUFFER, "
        "separated by commas")
    spec_draft_cpu_moe: bool = _draft(False,
        "-cmoed --cpu-moe-draft --spec-draft-cpu-moe LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
        help="keep all expert weights of the draft model in CPU memory")
    spec_draft_n_cpu_moe: int = _draft(0,
        "-ncmoed --n-cpu-moe-draft --spec-draft-ncmoe --spec-draft-n-cpu-moe "
        "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", min=0, max=1024,
        help="keep the expert weights of the draft model's first N layers in CPU memory")
    # fmt: on

    @property
    def has_draft_model(self) -> bool:
        """Whether there is a draft model."""
        return self.spec_draft_model is not None or self.spec_draft_hf is not None

    @property
    def draft_types(self) -> tuple[str, ...]:
        """The types of speculative decoding to use, in the order in which they are asked."""
        types = [name for name in self.spec_type if name not in ("none", "draft-simple")]
        if self.has_draft_model:
            types.append("draft-simple")
        return tuple(dict.fromkeys(types))
