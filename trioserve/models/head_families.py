"""The heads for drafts that llama.cpp computes, and the models that may have them.

Loading, `auto`, the tests and the table in `docs/speculative.md` have this one list. Where a model
is not in it, llama.cpp would end the process.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

#: The types of drafts by heads that read what goes into the layers of a model.
LAYER_TYPES = ("draft-eagle3", "draft-dflash", "draft-dspark")
#: Words in the names of files with heads, the preferred files first. The words and their order
#: are llama-server's.
FILE_WORDS: Mapping[str, str] = {
    "draft-mtp": "mtp-",
    "draft-dspark": "dspark-",
    "draft-dflash": "dflash-",
    "draft-eagle3": "eagle3-",
}
#: The types of drafts that draft-only files make, by architecture.
FILE_TYPES: Mapping[str, str] = {
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "gemma4-assistant": "draft-mtp",
}
#: The architecture of a model, by that of an assistant which reads the model's KV cache.
ASSISTED: Mapping[str, str] = {"gemma4-assistant": "gemma4"}


@attrs.frozen(kw_only=True)
class Family:
    """An architecture, and which heads its models may have.

    Attributes:
        arch: `general.architecture`.
        models: what people call them.
        n_mtp: how many MTP heads are computed, one for each token of a draft; 0: none.
        has_assistant: such a head reads the model's KV cache, and is always in a separate file.
        gives_layers: what goes into each layer can be read.
        gives_last: so can what comes out of the last one, by EAGLE-3 heads.
        gives_end: so can it by models that guess blocks.
        lacks: why llama.cpp does not compute the MTP heads that its files have.
        is_untried: such heads could work, but the tests have no model of it.
    """

    arch: str
    models: str
    n_mtp: int = 0
    has_assistant: bool = False
    gives_layers: bool = False
    gives_last: bool = False
    gives_end: bool = False
    lacks: str = ""
    is_untried: bool = False

    def takes(self, spec_type: str) -> bool:
        """True if its models may have drafts of this type."""
        if spec_type in LAYER_TYPES:
            return self.gives_layers
        return self.n_mtp > 0 or self.has_assistant


#: The most MTP heads of a model.
MANY = 8

_UNUSED = "llama.cpp keeps them in the file, but does not compute them"

FAMILIES: Mapping[str, Family] = {
    one.arch: one
    for one in (
        Family(arch="cohere2moe", models="Command A", n_mtp=1),
        Family(arch="deepseek2", models="DeepSeek V3 and R1, GLM 4.7 Flash", n_mtp=1),
        Family(arch="deepseek32", models="DeepSeek V3.2", n_mtp=1),
        Family(arch="glm-dsa", models="GLM 5", n_mtp=1),
        Family(arch="glm4moe", models="GLM 4.5, 4.6 and 4.7", n_mtp=1),
        Family(arch="hy_v3", models="Hunyuan V3", n_mtp=MANY),
        Family(arch="step35", models="Step 3.5 and 3.7", n_mtp=MANY),
        Family(arch="mimo2", models="MiMo V2", n_mtp=MANY, gives_layers=True, gives_last=True,
               gives_end=True),
        Family(arch="gemma4", models="Gemma 4", has_assistant=True, gives_layers=True),
        Family(arch="gpt-oss", models="gpt-oss", gives_layers=True, gives_last=True),
        Family(arch="hunyuan_vl", models="Hunyuan, Hunyuan VL", gives_layers=True),
        Family(arch="llama", models="Llama, Mistral 7B", gives_layers=True),
        Family(arch="minimax-m2", models="MiniMax M2", gives_layers=True),
        Family(arch="muse-glimmer", models="Muse Glimmer", gives_layers=True),
        Family(arch="nanbeige", models="Nanbeige", gives_layers=True),
        Family(arch="qwen3", models="Qwen 3", gives_layers=True),
        Family(arch="qwen3moe", models="Qwen 3 MoE", gives_layers=True),
        Family(arch="qwen35", models="Qwen 3.5, 3.6 and 3.8", n_mtp=1, gives_layers=True),
        Family(arch="qwen35moe", models="Qwen 3.5, 3.6 and 3.8 MoE", n_mtp=1, gives_layers=True),
        Family(arch="qwen3next", models="Qwen3-Next", n_mtp=1, gives_layers=True),
        Family(arch="nemotron_h", models="Nemotron-H", gives_layers=True, gives_end=True),
        Family(arch="nemotron_h_moe", models="Nemotron 3", n_mtp=1, gives_layers=True,
               gives_end=True),
        Family(arch="bailingmoe3", models="Ling 3", n_mtp=1, gives_layers=True),
        Family(arch="deepseek4", models="DeepSeek V4", n_mtp=1, gives_layers=True, gives_end=True),
        Family(arch="lfm2", models="LFM2", gives_layers=True),
        Family(arch="lfm2moe", models="LFM2 MoE", is_untried=True),
        Family(arch="minimax-01", models="MiniMax 01", is_untried=True),
        Family(arch="qwen4exp", models="Qwen 4", is_untried=True),
        Family(arch="bailingmoe2", models="Ling 2", lacks=_UNUSED),
        Family(arch="dots3note", models="dots 3", lacks=_UNUSED),
        Family(arch="exaone-moe", models="K-EXAONE", lacks=_UNUSED),
        Family(arch="exaone4", models="EXAONE 4", lacks=_UNUSED),
        Family(arch="glm4", models="GLM-OCR", lacks=_UNUSED),
        Family(arch="glm5-next", models="GLM 5.3 Flash",
               lacks="llama.cpp has no graph for them yet"),
    )
}  # fmt: skip


def refusal(arch: str, spec_type: str) -> str:
    """Say why models of an architecture have no drafts of this type; empty if they have.

    It is the end of a sentence, which also says what would change it.
    """
    family = FAMILIES.get(arch)
    if family is not None and family.takes(spec_type):
        return ""
    start = f"{spec_type} is not there for the architecture {arch}"
    if spec_type not in LAYER_TYPES:
        why = (family and family.lacks) or "llama.cpp does not compute MTP heads for it"
    elif family is not None and family.is_untried:
        return f"{start}: no such model has been tried; a later trioserve may have it"
    else:
        why = "llama.cpp does not give out what goes into its layers"
    return f"{start}: {why}; a later one may"
