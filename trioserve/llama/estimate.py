"""The memory need of a model: llama.cpp's own estimate, without loading the weights.

llama.cpp makes the model and its context with buffers that do not exist, and logs how large they
would be. It has a function for that, too, but of C++, whose result ctypes cannot read.

A file that llama.cpp cannot bear ends the process; `trial_process` does this in another one.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from trioserve.config import Config
from trioserve.errors import BackendMismatchError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.context import Context, generation_params
from trioserve.llama.drafter import draft_config
from trioserve.llama.embedding import embedding_params, pooling_beside
from trioserve.llama.layout import CELL, beside_text, cell_size, choose
from trioserve.llama.library import lib
from trioserve.llama.machine import free_memory
from trioserve.llama.model import LlamaModel
from trioserve.llama.shape import read_shape
from trioserve.llama.speech.speaker import speech_config, speech_params
from trioserve.models import auto_drafts, resolve, resolve_projector
from trioserve.models.gguf import parts_of, total_size
from trioserve.models.speech import resolve_speech
from trioserve.units import bytes_text

_MIB = 2**20
_BUFFER = re.compile(r"(compute|output) buffer size = +([\d.]+) MiB")
#: Of a KV cache or a recurrent state: its cells follow, or nothing does.
_CACHE = re.compile(r"\bsize = +([\d.]+) MiB( \( *\d+ cells|$)")


@attrs.frozen(kw_only=True)
class Estimate:
    """Bytes: of the weights, of the KV cache or what a model has in its place, and of the rest.

    `n_ctx` is the number of tokens that the cache has room for.
    """

    weights: int
    cache: int
    compute: int
    n_ctx: int

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return self.weights + self.cache + self.compute


def measure(config: Config) -> Estimate:
    """Estimate what a server with this configuration will need, on all devices together.

    That is the model with its context, its draft model, its adapters and its projector, and the
    model that speaks, without what the projectors compute in. An elastic KV cache counts with all
    the copies that it may have. Prompts that are kept in RAM come on top, up to `config.cache_ram`.
    Blocks, for about as long as it takes to read the vocabulary.

    Raises:
        ModelLoadError: the file or the context cannot be used.
        BackendMismatchError: the installed llama.cpp is not one we can use.
    """
    # Other machines need not be there for this, and have one client at a time.
    here = tuple(name for name in config.device if not name.startswith("RPC"))
    config = attrs.evolve(config, rpc=(), device=here)
    if (choice := auto_drafts.choose(config)) is not None:
        config = choice.config
    with LlamaModel.load(config, weights=False) as model:
        layout = None if config.serves_embeddings else choose(model, config)
        if config.serves_embeddings:
            params = embedding_params(model, config)
        else:
            params = generation_params(model, config, layout)
        _check_cells(max(params.n_ctx, 0 if layout is None else layout.n_ctx))
        lines: list[str] = []
        with library.listening(lines.append), Context(model, params, layout) as context:
            draft = None
            if config.spec_draft_model is not None and config.head_type is None:
                draft = draft_config(config, context)
            n_ctx = context.n_ctx
        (cache, compute), windows, beside = _sizes(lines), _windows(lines), (0, 0)
        if config.embd_ctx_size and not config.serves_embeddings:
            own = beside_text(config, model.info.n_ctx_train, pooling_beside(model, config))
            lines = []
            with library.listening(lines.append):
                Context(model, embedding_params(model, own)).close()
            beside = _sizes(lines)
        if layout is not None and layout.is_elastic:  # no more cells are written to at a time
            n_cells = layout.n_ctx + layout.n_copies
            cache = (cache - windows) * n_cells // layout.n_cells + windows
        cache, compute = cache + beside[0], compute + beside[1]
        weights = lib.llama_model_size(model.handle)
    weights += total_size(Path(path) for path, _ in config.lora_files)
    if config.spec_draft_model is not None and config.head_type is not None:
        head = resolve(config.spec_draft_model)
        layers = () if (shape := read_shape(head)) is None else shape.layers
        types = (config.spec_draft_type_k, config.spec_draft_type_v)
        weights += total_size(parts_of(head))
        cache += int(n_ctx * cell_size(layers, *types))
    projector = None if config.reranking else resolve_projector(config)
    if projector is not None:
        weights += total_size([projector])
    others = [] if draft is None else [measure(attrs.evolve(draft, embd_ctx_size=0))]
    if (files := resolve_speech(config)) is not None:
        others.append(_measure_speech(speech_config(config, files)))
    for other in others:
        weights, cache, compute = (
            weights + other.weights, cache + other.cache, compute + other.compute
        )  # fmt: skip
    return Estimate(weights=weights, cache=cache, compute=compute, n_ctx=n_ctx)


def _measure_speech(config: Config) -> Estimate:
    """Estimate what a model that speaks needs; `config` is that of `speech_config`."""
    with LlamaModel.load(config, weights=False) as model:
        lines: list[str] = []
        params = speech_params(model, config)
        with library.listening(lines.append), Context(model, params) as context:
            n_ctx = context.n_ctx
        weights = lib.llama_model_size(model.handle)
    cache, compute = _sizes(lines)
    weights += total_size([Path(config.mmproj or "")])
    return Estimate(weights=weights, cache=cache, compute=compute, n_ctx=n_ctx)


def _check_cells(n_ctx: int) -> None:
    """Refuse a context whose cells alone, without keys and values, would fill the memory."""
    free = free_memory()
    if free is not None and n_ctx * CELL > free / 2:
        raise ModelLoadError(
            f"A context of {n_ctx} tokens does not fit into {bytes_text(free)} of memory."
        )


def _windows(lines: list[str]) -> int:
    """Read how many bytes the cache of the layers with a sliding window takes, which is whole."""
    after = [i for i, line in enumerate(lines) if re.search(r"creating +SWA KV cache", line)]
    rest = lines[after[0] :] if after else []
    found = [_CACHE.search(line) for line in rest if "buffer size" not in line]
    return int(sum(float(one[1]) for one in found if one is not None) * _MIB)


def _sizes(lines: list[str]) -> tuple[int, int]:
    """Read the log of making a context: the bytes of the cache, and those to compute with."""
    cache = compute = 0.0
    has_compute = False
    for line in lines:
        if (buffer := _BUFFER.search(line)) is not None:
            compute += float(buffer[2])
            has_compute |= buffer[1] == "compute"
        elif "buffer size" not in line and (found := _CACHE.search(line)) is not None:
            cache += float(found[1])
    if not has_compute:
        raise BackendMismatchError("The installed llama.cpp does not log the sizes of its buffers.")
    return int(cache * _MIB), int(compute * _MIB)
