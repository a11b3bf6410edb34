"""Chooses sizes so that a model fits into the memory that is free now.

All of it is arithmetic on the header of the file, so it takes no time and cannot end the process.
What the user set is kept. Of the rest, what costs least is given up first, in this order:

1. the context, down to `Config.fit_ctx`;
2. experts on a GPU, then whole layers on a GPU;
3. sequences that are kept for later prompts, and then the physical batch;
4. the precision of the KV cache.

Where the weights alone are larger than the memory, they can still be mapped, and are read again and
again: that comes last.

An elastic KV cache takes memory as it is written to. It counts with all tokens of the context, once
each: that is what admission lets in. Copies take at most half of the remaining memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs

from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import lazy_pages
from trioserve.llama.context import DRAFT_ROWS, SCORE_ROWS
from trioserve.llama.drafter import draft_config
from trioserve.llama.layout import (
    CELL,
    Layout,
    LayoutFacts,
    beside_text,
    cell_size,
    decide,
    elastic_size,
    for_embeddings,
    pad,
    snapshots,
)
from trioserve.llama.model import longest
from trioserve.llama.shape import Shape
from trioserve.units import bytes_text

_MIB = 2**20

#: Bytes of a server without a model: the data of Python, llama.cpp and the libraries.
PROCESS = 84 * _MIB

#: Bytes of a vocabulary for each token, in llama.cpp and here.
_TOKEN = 345

#: RAM that stays free: a share of the need, and bytes for requests.
_SPARE_SHARE, _SPARE = 0.05, 32 * _MIB

#: Physical batches and types of the KV cache to try, from the best to the last resort.
_UBATCHES = (256, 128, 64)
_LAST_TYPE = "q8_0"


@attrs.frozen(kw_only=True)
class Room:
    """The memory that is free now. `gpus` are the devices that the model may use, in order.

    `data` is how much of the RAM may be written to; by default all of it.
    """

    ram: int
    data: int = attrs.field()
    gpus: tuple[int, ...] = ()
    #: Of the machine.
    total_ram: int = 0
    #: Pages of a KV cache may exist only once they are written to.
    is_lazy: bool = attrs.field(factory=lazy_pages.is_supported)

    @data.default
    def _all_of_it(self) -> int:
        return self.ram


@attrs.frozen(kw_only=True)
class Models:
    """The files of a server: a model, perhaps a draft model, and files that count as they are.

    `is_mapped`: the weights in RAM are pages of the file, which the system may drop.
    """

    model: Shape
    draft: Shape | None = None
    #: Bytes of adapters, of a projector and of a model that speaks.
    others: int = 0
    is_mapped: bool = False


@attrs.frozen(kw_only=True)
class Need:
    """Bytes of a server, once its context is full. `gpus` are those on each device.

    `mapped` are weights in RAM that the system may drop, and read again.
    """

    process: int
    weights: int
    mapped: int
    cache: int
    compute: int
    gpus: tuple[int, ...]
    n_ctx: int

    @property
    def ram(self) -> int:
        """Bytes of RAM, with mapped weights."""
        return self.process + self.weights + self.mapped + self.cache + self.compute


@attrs.frozen(kw_only=True)
class Fit:
    """A configuration that fits, what it needs, and what was changed, in words."""

    config: Config
    need: Need
    room: Room
    changes: tuple[str, ...] = ()
    #: The weights are larger than the memory, and will be read again and again.
    is_tight: bool = False

    @property
    def wanted(self) -> int:
        """Bytes of RAM that must be free for it."""
        return self.need.ram + _spare(self.need)

    @property
    def left(self) -> int:
        """Bytes of RAM that are left beside it."""
        wanted, free = _scarce(self.need, self.room)
        return max(0, free - wanted)


def fit(models: Models, config: Config, room: Room) -> Fit:
    """Choose what the configuration leaves open, so that all fits into memory.

    A configuration that fits is not changed.

    Raises:
        ModelLoadError: nothing that may be chosen fits.
    """
    if _fits(need(models, config, room), config, room):
        return Fit(config=config, need=need(models, config, room), room=room)
    is_hopeless = models.model.weights > room.ram + sum(room.gpus)
    for may_drop in (False, True)[is_hopeless : 1 + models.is_mapped]:
        for one in _choices(models, config, room):
            found = _with_context(models, one, room, may_drop=may_drop)
            if found is not None:
                return Fit(
                    config=found,
                    need=need(models, found, room),
                    room=room,
                    changes=tuple(_changes(config, found, models.model)),
                    is_tight=may_drop,
                )
    raise _refusal(models, config, room)


def need(models: Models, config: Config, room: Room) -> Need:
    """Compute what a server with this configuration takes."""
    layout = layout_of(models.model, config, room)
    found = _need(models.model, config, layout, room)
    process = PROCESS + _TOKEN * models.model.n_vocab
    if models.draft is not None:
        own = draft_config(config, layout)
        found += _need(models.draft, own, layout_of(models.draft, own, room), room)
        process += _TOKEN * models.draft.n_vocab
    if config.embd_ctx_size and not config.serves_embeddings:
        own, shape = beside(models.model, config), _without_weights(models.model)
        found += _need(shape, own, layout_of(shape, own, room), room)
    mapped = found.weights if models.is_mapped else 0
    return Need(
        process=process,
        weights=found.weights + models.others - mapped,
        mapped=mapped,
        cache=found.cache,
        compute=found.compute,
        gpus=found.gpus,
        n_ctx=layout.n_ctx,
    )


# -- one model


def beside(shape: Shape, config: Config) -> Config:
    """Set what a second context has, which makes embeddings; the pooling takes no memory."""
    return beside_text(config, shape.n_ctx_train, "last")


def _without_weights(shape: Shape) -> Shape:
    layers = tuple(attrs.evolve(one, weights=0, dense=0, experts=0) for one in shape.layers)
    return attrs.evolve(shape, layers=layers, embedding=0, output=0)


@attrs.frozen
class _Sum:
    weights: int
    cache: int
    compute: int
    gpus: tuple[int, ...]

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(
            self.weights + other.weights,
            self.cache + other.cache,
            self.compute + other.compute,
            tuple(map(sum, zip(self.gpus, other.gpus, strict=True))),
        )


def layout_of(shape: Shape, config: Config, room: Room) -> Layout:
    """Choose the layout of the KV cache, as for a loaded model."""
    config = _as_run(shape, config)
    offloads = room.gpus and config.n_gpu_layers != 0 and config.kv_offload
    facts = LayoutFacts(
        n_ctx_train=shape.n_ctx_train,
        can_cut=_can_cut(shape, config),
        n_snapshots=snapshots(config, shape.arch),
        longest=longest(shape.n_ctx_train, config, lambda: shape.has_positions),
        elastic_size=elastic_size(shape, config) if room.is_lazy and not offloads else 0,
        memory=room.total_ram or None,
    )
    return decide(config, facts)


def _can_cut(shape: Shape, config: Config) -> bool:
    return not (shape.has_state or (shape.window and not config.swa_full))


def _as_run(shape: Shape, config: Config) -> Config:
    """Apply what a context for embeddings changes."""
    if not config.serves_embeddings:
        return config
    size = min(config.batch_size, config.ubatch_size)
    return for_embeddings(config, size, is_causal=shape.is_causal, has_state=shape.has_state)


def _need(shape: Shape, config: Config, layout: Layout, room: Room) -> _Sum:
    """Add up what a model and its context take in RAM and on each device."""
    run = _as_run(shape, config)
    n_outputs, n_scores, n_ubatch = _batch(shape, run, layout)
    places, types = _places(shape, config, room), (config.cache_type_k, config.cache_type_v)
    ram, cache, gpus = shape.embedding, CELL * layout.n_cells, [0] * len(room.gpus)
    if not (shape.has_cache and shape.is_causal):
        cache = 0
    windows = _window_cells(shape, run, layout, n_ubatch)
    for i, (layer, place) in enumerate(zip(shape.layers, places, strict=False)):
        # Bytes in RAM, also of layers on a GPU.
        in_ram = layer.experts if config.cpu_moe or i < config.n_cpu_moe else 0
        in_ram += layer.dense if i < config.n_cpu_ffn else 0
        n_cells = windows if layer.is_windowed and not config.swa_full else layout.n_ctx
        of_cache = int(cell_size([layer], *types) * n_cells) if shape.is_causal else 0
        of_cache += layer.state * layout.n_seqs * (1 + snapshots(run, shape.arch))
        if place is None or not config.kv_offload:
            cache += of_cache
        else:
            gpus[place] += of_cache
        ram += layer.weights if place is None else in_ram
        if place is not None:
            gpus[place] += layer.weights - in_ram
    last = places[-1]
    output = shape.output + (shape.embedding if shape.is_tied and last is not None else 0)
    if last is None:
        ram += output
    else:
        gpus[last] += output
    masks, work = _graph(shape, run, layout, n_ubatch, windows)
    of_row = 4 * shape.n_vocab if shape.is_causal else 0
    # Outputs of a batch have room at the start, and their copies when they are asked for.
    logits = (n_outputs + n_scores) * of_row
    rows = n_outputs * (4 * shape.n_embd if config.serves_embeddings else of_row)
    compute = rows + (
        max(masks + work, logits) if last is None else masks + 4 * n_ubatch * shape.n_embd
    )
    for place in {one for one in places if one is not None}:
        gpus[place] += max(masks + work, logits if place == last else 0)
    return _Sum(ram, cache, compute, tuple(gpus))


def _batch(shape: Shape, config: Config, layout: Layout) -> tuple[int, int, int]:
    """Return how many rows are sampled from, how many are for scores, and the physical batch."""
    n_drafts = DRAFT_ROWS if config.draft_types else 0
    n_outputs = max(layout.n_seqs, config.parallel + n_drafts)
    n_batch, n_scores = min(config.batch_size, layout.n_ctx), 0
    if not config.serves_embeddings:
        n_left = min(n_batch - n_outputs, config.ubatch_size // 2)
        n_scores = min(SCORE_ROWS, max(1, n_left))
    n_batch = max(n_batch, n_outputs + n_scores)
    n_ubatch = min(config.ubatch_size, n_batch)
    if shape.window and not config.swa_full:
        n_ubatch = max(n_ubatch, n_outputs + n_scores)
    return (n_batch if config.serves_embeddings else n_outputs), n_scores, n_ubatch


def _window_cells(shape: Shape, config: Config, layout: Layout, n_ubatch: int) -> int:
    """Compute the cells of a layer with a sliding window, of all sequences together."""
    if layout.unified:
        return min(layout.n_ctx, pad(shape.window * layout.n_seqs + n_ubatch))
    return layout.n_seqs * min(layout.n_part, pad(shape.window + n_ubatch))


def _graph(
    shape: Shape, config: Config, layout: Layout, n_ubatch: int, windows: int
) -> tuple[int, int]:
    """Estimate the bytes of a graph: the masks of attention, and what a layer computes in."""
    has_full = any(one.key and not one.is_windowed for one in shape.layers)
    has_windows = any(one.is_windowed for one in shape.layers) and not config.swa_full
    visible = 0
    if has_full or (shape.has_cache and not has_windows):
        visible += layout.n_part
    if has_windows:
        visible += windows if layout.unified else windows // layout.n_seqs
    if config.flash_attn == "off":
        return 4 * visible * n_ubatch, 4 * n_ubatch * (visible * shape.n_heads + shape.activations)
    return 2 * visible * n_ubatch, 4 * n_ubatch * shape.activations


# -- devices


def _places(shape: Shape, config: Config, room: Room) -> list[int | None]:
    """Return where each layer is, and what follows the last one: the number of a GPU, or RAM."""
    n_all = len(shape.layers) + 1
    n_on = n_all if config.n_gpu_layers < 0 else min(config.n_gpu_layers, n_all)
    if not room.gpus or not n_on:
        return [None] * n_all
    if config.split_mode == "none":
        return [None] * (n_all - n_on) + [min(config.main_gpu, len(room.gpus) - 1)] * n_on
    shares = [*config.tensor_split, *[0.0] * len(room.gpus)][: len(room.gpus)]
    shares = shares if any(shares) else [float(free) for free in room.gpus]
    total = sum(shares)
    ends: list[float] = []
    for share in shares:
        ends.append((ends[-1] if ends else 0.0) + share / total)
    last = len(room.gpus) - 1
    return [
        *[None] * (n_all - n_on),
        *(min(bisect_right(ends, i / n_on + 1e-9), last) for i in range(n_on)),
    ]


def _filled(models: Models, config: Config, room: Room) -> Config:
    """Fill the devices one after the other, as far as each has room; the last takes the rest."""
    n_all = len(models.model.layers) + 1
    n_on = n_all if config.n_gpu_layers < 0 else min(config.n_gpu_layers, n_all)
    limits, counts = _limits(config, room), [0] * len(room.gpus)

    def split(device: int, count: int) -> Config:
        shares = [*counts[:device], count, *counts[device + 1 :]]
        shares[device + 1] = n_on - sum(shares[: device + 1])
        return attrs.evolve(config, tensor_split=tuple(map(float, shares)))

    def fits(device: int, count: int) -> bool:
        return need(models, split(device, count), room).gpus[device] <= limits[device]

    for device in range(len(counts) - 1):
        counts[device] = _most(n_on - sum(counts), partial(fits, device))
    counts[-1] = n_on - sum(counts)
    return attrs.evolve(config, tensor_split=tuple(map(float, counts)))


def _most(most: int, holds: Callable[[int], bool]) -> int:
    """Find the largest number that holds. 0 does, and so do all numbers below the largest."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not holds(count))


# -- choices


def _choices(models: Models, config: Config, room: Room) -> Iterator[Config]:
    """Yield what may be tried, from the best to the last resort. The context is left as it is."""
    for one in _precisions(models, config):
        yield from _placements(models, one, room)


def _precisions(models: Models, config: Config) -> list[Config]:
    """Return physical batches and types of the KV cache, from the best to the smallest."""
    defaults = {field.name: field.default for field in attrs.fields(Config)}
    batches = [config]
    if config.cache_seqs == defaults["cache_seqs"]:
        batches.append(attrs.evolve(config, cache_seqs=0))
    if config.ubatch_size == defaults["ubatch_size"]:
        batches += [attrs.evolve(batches[-1], ubatch_size=one) for one in _UBATCHES]
    types = (config.cache_type_k, config.cache_type_v)
    is_free = types == (defaults["cache_type_k"], defaults["cache_type_v"])
    widths = {size for one in models.model.layers for size in (one.key, one.value)}
    if is_free and config.flash_attn != "off" and not any(size % 32 for size in widths):
        batches += [
            attrs.evolve(one, cache_type_k=_LAST_TYPE, cache_type_v=_LAST_TYPE) for one in batches
        ]
    return batches


def _placements(models: Models, config: Config, room: Room) -> Iterator[Config]:
    """Yield where the layers may be: on the devices as far as they have room, the rest in RAM."""
    yield config
    if not room.gpus or config.override_tensor or config.split_mode not in ("none", "layer"):
        return
    may_split = len(room.gpus) > 1 and not config.tensor_split and config.split_mode == "layer"
    shape, least = models.model, _with_least(models, config)
    n_layers = len(shape.layers)

    def both(one: Config) -> Iterator[Config]:
        if may_split:
            split = _filled(models, attrs.evolve(one, ctx_size=least.ctx_size), room).tensor_split
            yield attrs.evolve(one, tensor_split=split)
        yield one

    def spills(**fields: Any) -> bool:
        """Return True if the devices cannot hold their layers in any way."""
        one = attrs.evolve(least, **fields)
        return not any(_fits_gpus(need(models, each, room), config, room) for each in both(one))

    yield from both(config)
    if any(one.experts for one in shape.layers) and not (config.cpu_moe or config.n_cpu_moe):
        count = _most(n_layers, lambda count: spills(n_cpu_moe=count - 1))
        if count < n_layers or not spills(n_cpu_moe=n_layers):
            yield from both(attrs.evolve(config, n_cpu_moe=count))
    if config.n_gpu_layers == -1:
        count = _most(n_layers, lambda count: not spills(n_gpu_layers=count))
        yield from both(attrs.evolve(config, n_gpu_layers=count))


def _with_least(models: Models, config: Config) -> Config:
    """Set the smallest context that may be chosen."""
    if config.ctx_size or config.kv_unified_per_slot:
        return config
    n_ctx = min(pad(config.fit_ctx), pad(models.model.n_ctx_train))
    return attrs.evolve(config, ctx_size=n_ctx)


def _with_context(models: Models, config: Config, room: Room, *, may_drop: bool) -> Config | None:
    """Choose the longest context that fits, if it is free to choose; None: not even the least."""

    def fits(one: Config) -> bool:
        return _fits(need(models, one, room), one, room, may_drop=may_drop)

    if config.ctx_size or config.kv_unified_per_slot:
        return config if fits(config) else None
    if fits(config) and not may_drop:
        return config
    least, most = pad(config.fit_ctx), pad(models.model.n_ctx_train)
    if least >= most:
        return config if fits(config) else None
    if not fits(attrs.evolve(config, ctx_size=least)):
        return None
    if may_drop:  # what the context takes, the weights lack
        return attrs.evolve(config, ctx_size=least)
    longest = _longest(models, config, room, most, may_drop=False)
    return attrs.evolve(config, ctx_size=longest)


def _longest(models: Models, config: Config, room: Room, most: int, *, may_drop: bool) -> int:
    """Find the longest context that fits, up to `most` tokens; 0: none does."""

    def fits(count: int) -> bool:
        one = attrs.evolve(config, ctx_size=count * 256)
        return _fits(need(models, one, room), one, room, may_drop=may_drop)

    return _most(most // 256, fits) * 256


def _spare(found: Need) -> int:
    return int(_SPARE_SHARE * (found.ram - found.mapped)) + _SPARE


def _limits(config: Config, room: Room) -> list[int]:
    targets = config.fit_target
    return [free - targets[min(i, len(targets) - 1)] * _MIB for i, free in enumerate(room.gpus)]


def _scarce(found: Need, room: Room, *, may_drop: bool = False) -> tuple[int, int]:
    """Return what is wanted of RAM and what is free: of all, or of what is written to."""
    wanted = found.ram + _spare(found)
    pairs = (
        (wanted - (found.mapped if may_drop else 0), room.ram),
        (wanted - found.mapped, room.data),
    )
    return max(pairs, key=lambda pair: pair[0] - pair[1])


def _fits(found: Need, config: Config, room: Room, *, may_drop: bool = False) -> bool:
    wanted, free = _scarce(found, room, may_drop=may_drop)
    return wanted <= free and _fits_gpus(found, config, room)


def _fits_gpus(found: Need, config: Config, room: Room) -> bool:
    pairs = zip(found.gpus, _limits(config, room), strict=True)
    return all(size <= limit for size, limit in pairs if size)


# -- words


def _changes(config: Config, found: Config, shape: Shape) -> Iterator[str]:
    """Say what was chosen, as flags with their values."""
    if found.ctx_size != config.ctx_size:
        yield f"--ctx-size {found.ctx_size} of {shape.n_ctx_train}"
    for name in (
        "n_cpu_moe",
        "n_gpu_layers",
        "tensor_split",
        "cache_seqs",
        "ubatch_size",
        "cache_type_k",
        "cache_type_v",
    ):
        value: Any = getattr(found, name)
        if value != getattr(config, name):
            text = ",".join(f"{one:g}" for one in value) if isinstance(value, tuple) else value
            yield f"--{name.replace('_', '-')} {text}"


def _refusal(models: Models, config: Config, room: Room) -> ModelLoadError:
    """Say what the least need is, what is free, and which setting would fit."""
    smallest, nearest = None, 0
    for one in _placements(models, _precisions(models, config)[-1], room):
        least = _with_least(models, one)
        found = need(models, least, room)
        if smallest is None or _over(found, config, room) < _over(smallest, config, room):
            smallest = found
        longest = _longest(models, one, room, found.n_ctx - 256, may_drop=models.is_mapped)
        nearest = max(nearest, longest)
    assert smallest is not None
    parts = (
        f"{bytes_text(smallest.weights + smallest.mapped)} for the weights, "
        f"{bytes_text(smallest.cache)} for a context of {smallest.n_ctx} tokens, "
        f"{bytes_text(smallest.compute)} for computing and "
        f"{bytes_text(smallest.process)} for the server"
    )
    wanted, free = _scarce(smallest, room)
    places = [f"{bytes_text(wanted)} of RAM, where {bytes_text(free)} are free"]
    for i, (size, limit) in enumerate(zip(smallest.gpus, _limits(config, room), strict=True)):
        if size > limit:
            places.append(f"{bytes_text(size)} on GPU {i}, where {bytes_text(limit)} are free")
    advice = "take a file with a smaller quantization"
    if nearest:
        advice = f"--ctx-size {nearest} would fit"
    return ModelLoadError(
        f"The model does not fit into memory: it needs {' and '.join(places)} ({parts}); {advice}."
    )


def _over(found: Need, config: Config, room: Room) -> int:
    pairs = zip(found.gpus, _limits(config, room), strict=True)
    wanted, free = _scarce(found, room)
    return max(0, wanted - free) + sum(max(0, size - limit) for size, limit in pairs)


def summary(found: Fit) -> str:
    """Describe a fit in one line."""
    use = found.need
    gpus = "".join(
        f", {bytes_text(size)} of {bytes_text(free)} on GPU {i}"
        for i, (size, free) in enumerate(zip(use.gpus, found.room.gpus, strict=True))
        if size
    )
    ram = f"{bytes_text(use.ram)} of {bytes_text(found.room.ram)} free RAM"
    text = f"{ram}{gpus}: a context of {use.n_ctx} tokens"
    if not found.changes:
        return f"{text}, nothing had to be made smaller"
    return f"{text}, with {' '.join(found.changes)} to fit the memory"
