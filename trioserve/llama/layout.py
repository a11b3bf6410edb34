"""Layout: how the KV cache is divided among sequences, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from trioserve.config import Config
from trioserve.config.checks import without_drafts, without_speech
from trioserve.errors import ModelLoadError
from trioserve.llama import lazy_pages
from trioserve.llama.library import lib
from trioserve.llama.machine import free_memory, total_memory
from trioserve.llama.model import LlamaModel
from trioserve.llama.shape import Layer, Shape
from trioserve.units import bytes_text


@attrs.frozen
class _CacheType:
    """A type of the values in the KV cache: ggml's number for it, and bytes per value."""

    number: int
    width: float


CACHE_TYPES = {
    "f32": _CacheType(0, 4),
    "f16": _CacheType(1, 2),
    "bf16": _CacheType(30, 2),
    "q4_0": _CacheType(2, 18 / 32),
    "q4_1": _CacheType(3, 20 / 32),
    "q5_0": _CacheType(6, 22 / 32),
    "q5_1": _CacheType(7, 24 / 32),
    "q8_0": _CacheType(8, 34 / 32),
    "iq4_nl": _CacheType(20, 18 / 32),
}


#: By default, each slot has a part of the KV cache if that has at least this many tokens.
ENOUGH = 4096

#: Texts in a batch of embeddings. It has 512 tokens by default, and few texts have less than 8.
_MAX_TEXTS = 64

#: The most tokens that a recurrent state is taken back by. Each takes as much memory as the state.
MAX_SNAPSHOTS = 8
#: Architectures whose states llama.cpp can take back.
SNAPSHOT_FAMILIES = frozenset({
    "bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h",
    "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp",
})  # fmt: skip

#: Bytes that llama.cpp allocates for a cell, besides its keys and values.
CELL = 64


@attrs.frozen(kw_only=True)
class Layout:
    """The division of a KV cache.

    In a unified cache, a sequence may be as long as the whole context, and a beginning is shared
    without a copy; but the attention of every token skips over the cells of the other sequences. In
    a split one, each sequence has a part, and attention sees nothing else. In an elastic one, these
    parts are together larger than the context, and have memory only where they were written to. The
    beginning that sequences share counts once, as long as the copies take no more than `n_copies`.
    """

    unified: bool
    is_elastic: bool
    n_seqs: int
    n_ctx: int  # cells that all sequences together may hold
    n_part: int  # cells of each sequence's part
    n_copies: int = 0  # cells beyond `n_ctx` that copies may take

    @property
    def n_cells(self) -> int:
        """The number of cells that llama.cpp allocates."""
        return self.n_ctx if self.unified else self.n_seqs * self.n_part


@attrs.frozen(kw_only=True)
class LayoutFacts:
    """The facts about a model and a machine that decide the layout."""

    n_ctx_train: int
    can_cut: bool
    #: States of each sequence to go back to, besides the newest; see `snapshots`.
    n_snapshots: int
    #: The most tokens of a sequence.
    longest: int
    #: Bytes of 256 cells of an elastic cache; 0: it cannot be elastic.
    elastic_size: int
    #: Bytes of the machine's memory; None: unknown.
    memory: int | None


def choose(model: LlamaModel, config: Config, *, may_be_elastic: bool = True) -> Layout:
    """Choose the layout for a loaded model, with room for copies; see `decide`."""
    may_be_elastic &= lazy_pages.is_supported() and not (model.has_state or on_gpu(config))
    facts = LayoutFacts(
        n_ctx_train=model.info.n_ctx_train,
        can_cut=model.can_cut,
        n_snapshots=snapshots(config, model.arch),
        longest=model.max_n_ctx_seq(config),
        elastic_size=elastic_size(model.shape, config) if may_be_elastic else 0,
        memory=total_memory(),
    )
    layout = decide(config, facts)
    if not layout.is_elastic:
        return layout
    spare = min(layout.n_ctx, layout.n_cells - layout.n_ctx)
    n_copies = min(spare, _room_for_copies(model, config, layout.n_ctx))
    return attrs.evolve(layout, n_copies=max(0, n_copies))


def for_embeddings(config: Config, size: int, *, is_causal: bool, has_state: bool) -> Config:
    """Set what a context for embeddings has, with batches of `size` tokens."""
    n_ctx = config.ctx_size or config.parallel * config.kv_unified_per_slot
    return attrs.evolve(
        config,
        # Without a causal mask, a text is computed in one batch, and the cache holds no more.
        ctx_size=n_ctx if is_causal else size,
        kv_unified_per_slot=0,
        batch_size=size,
        ubatch_size=size,
        parallel=min(config.parallel if has_state else _MAX_TEXTS, size),
        cache_seqs=0,
        kv_unified=True,
    )


def beside_text(config: Config, n_ctx_train: int, pooling: str) -> Config:
    """Set what a context for embeddings has beside a context that generates text."""
    return attrs.evolve(
        without_speech(without_drafts(config)),
        embeddings=True,
        ctx_size=min(config.embd_ctx_size, n_ctx_train),
        kv_unified_per_slot=0,
        pooling=pooling,
        lora=(),
        lora_dir=None,
        control_vector=(),
        backend_sampling=False,
    )


def decide(config: Config, facts: LayoutFacts) -> Layout:
    """Choose the layout, unless the configuration sets it.

    It is elastic where the memory allows that, and otherwise split if the parts are long enough.
    """
    n_ctx = config.ctx_size or config.parallel * config.kv_unified_per_slot
    n_ctx = pad(n_ctx or facts.n_ctx_train)
    is_one = config.parallel == 1 or config.cache_seqs > 0
    n_part = 0
    if config.kv_unified is None and not is_one:
        n_part = _elastic_part(config, facts, n_ctx)
    unified = config.kv_unified
    if unified is None:
        needs_all = is_one or config.kv_unified_per_slot > 0 or not facts.can_cut
        unified = not n_part and (needs_all or n_ctx // config.parallel < ENOUGH)
    n_seqs = sequences(config, facts.n_snapshots, unified=unified)
    is_elastic = n_part > 0
    if not is_elastic:
        n_part = n_ctx if unified else pad(n_ctx // n_seqs)
    return Layout(unified=unified, is_elastic=is_elastic, n_seqs=n_seqs, n_ctx=n_ctx, n_part=n_part)


def _room_for_copies(model: LlamaModel, config: Config, n_ctx: int) -> int:
    """Return how many cells fit into half of the memory that a full context leaves free."""
    free = free_memory()
    if free is None:
        return n_ctx
    # Layers with a window count as the others: a little too much rather than nothing.
    size = cache_size(model.shape, config, 256, with_windows=True)
    return max(0, free * 256 // size - n_ctx) // 2


def _elastic_part(config: Config, facts: LayoutFacts, n_ctx: int) -> int:
    """Return how many cells each part of an elastic cache may have; 0: split it, or do not.

    Each is as long as the context, unless all parts together have more addresses than half of the
    memory: Linux refuses to allocate more than all of it, and to make a GiB takes about a quarter
    of a second.
    """
    if not facts.elastic_size:
        return 0
    wanted = min(n_ctx, pad(facts.longest))
    room = wanted
    if facts.memory is not None:
        room = facts.memory // 2 // (config.parallel * facts.elastic_size) * 256
    n_part = min(wanted, room)
    return n_part if n_part >= min(wanted, max(ENOUGH, n_ctx // config.parallel)) else 0


def on_gpu(config: Config) -> bool:
    """Return True if the KV cache, or a part of it, may be on a GPU."""
    offloads = config.n_gpu_layers != 0 and config.kv_offload
    return bool(lib.llama_supports_gpu_offload() and offloads)


def snapshots(config: Config, arch: str) -> int:
    """Return how many states a recurrent model keeps of each sequence, besides the newest.

    It is the length of the longest draft, within bounds; without drafts, and of other models, 0.
    """
    if arch not in SNAPSHOT_FAMILIES or not config.draft_types:
        return 0
    lengths = {
        "ngram-simple": config.spec_ngram_simple_size_m,
        "ngram-mod": config.spec_ngram_mod_n_max,
    }
    longest = max(lengths.get(name, config.spec_draft_n_max) for name in config.draft_types)
    return min(longest, MAX_SNAPSHOTS)


def sequences(config: Config, n_snapshots: int = 0, *, unified: bool = True) -> int:
    """Return the number of KV sequences: one for each slot, and those kept for later prompts.

    In a unified cache a kept sequence costs the cells it holds. In a split one it costs its whole
    part, used or not. With `n_snapshots`, fewer are kept: each takes as many states more.
    """
    extra = config.cache_seqs
    if extra == -1:
        extra = 32 // (1 + n_snapshots) if unified else 0
    return min(config.parallel + extra, int(lib.llama_max_parallel_sequences()))


def cell_size(layers: Iterable[Layer], key_type: str, value_type: str) -> float:
    """Return the bytes of a cell in some layers together, with keys and values of these types."""
    key, value = (CACHE_TYPES[one].width for one in (key_type, value_type))
    return sum(one.key * key + one.value * value for one in layers)


def cache_size(
    shape: Shape | None, config: Config, n_ctx: int, *, with_windows: bool = False
) -> int:
    """Return the bytes of a KV cache of `n_ctx` cells; 0 if the header could not be read.

    Layers with a sliding window count if they have as many cells as the others, or if told so.
    """
    with_windows |= config.swa_full
    layers = () if shape is None else shape.layers
    counted = [one for one in layers if with_windows or not one.is_windowed]
    return int(n_ctx * cell_size(counted, config.cache_type_k, config.cache_type_v))


def elastic_size(shape: Shape | None, config: Config) -> int:
    """Return the bytes of 256 cells of an elastic cache; 0: it cannot be elastic."""
    # Without flash attention, each token is written all over the values.
    if config.flash_attn == "off" or shape is None or shape.has_state or not shape.is_even:
        return 0
    size = cache_size(shape, config, 256)
    return size or cache_size(shape, config, 256, with_windows=True)


def check_memory(model: LlamaModel, config: Config, layout: Layout, params: Any) -> None:
    """Refuse a cache that is larger than the memory that is free.

    llama.cpp writes to all of it at once, and the system would kill the process.
    """
    free = free_memory()
    if free is None or on_gpu(config):
        return  # unknown, or on a GPU, where an allocation that is too large fails cleanly
    cells = layout.n_ctx if layout.is_elastic else layout.n_cells
    cache = cache_size(model.shape, config, cells)
    if layout.is_elastic:
        cache += layout.n_cells * CELL
    logits = params.n_outputs_max * model.info.n_vocab * 4
    if cache + logits > free:
        raise ModelLoadError(
            f"The KV cache for {cells} tokens does not fit: it needs {bytes_text(cache)}, and only "
            f"{bytes_text(max(0, free - logits))} of memory are free; set a smaller --ctx-size."
        )


def pad(n_ctx: int) -> int:
    """Round a number of cells up: llama.cpp counts them in steps of 256."""
    return max(1, -(-n_ctx // 256)) * 256
