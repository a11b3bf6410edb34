"""What is known of the model, its slots and its queue."""

from __future__ import annotations

import attrs

from trioserve.types.media import CellKey
from trioserve.types.sampling import TokenId
from trioserve.types.task import Adapters, CacheRoot, Task


@attrs.frozen(kw_only=True)
class FimTokens:
    """The tokens of a vocabulary that mark the parts of a text with a gap; -1: there is none."""

    prefix: TokenId = -1
    suffix: TokenId = -1
    middle: TokenId = -1
    repository: TokenId = -1
    file: TokenId = -1  # before each file of a repository


@attrs.frozen(kw_only=True)
class ModelInfo:
    """What is known of the loaded model."""

    name: str  # the alias that clients use
    path: str
    description: str  # such as "llama 3M Q8_0"
    ftype: str
    n_params: int
    size: int  # bytes of all tensors
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    vocab_type: int  # llama.cpp's enum llama_vocab_type
    chat_template: str | None
    bos_token: str
    eos_token: str
    add_bos: bool
    modified: int  # seconds since the epoch
    metadata: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class AdapterInfo:
    """A LoRA adapter that was loaded with the model. Its id is its place among them."""

    path: str
    scale: float = 1.0  # as the configuration has it
    task_name: str = ""  # of its metadata
    prompt_prefix: str = ""


@attrs.frozen(kw_only=True)
class SlotState:
    """What a slot has computed: a text, and the state of a KV sequence that holds it."""

    keys: tuple[CellKey, ...]  # what its cells are compared by
    root: CacheRoot = attrs.field(default=CacheRoot())
    state: bytes = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class SlotStatus:
    """A look at one slot, taken between two steps."""

    id: int
    state: str  # "idle", "prefill" or "decode"
    n_ctx: int
    task_id: int | None
    n_prompt: int
    n_past: int  # tokens in the KV sequence
    n_cached: int
    n_decoded: int
    paused: bool
    encoding: bool = False  # its prompt waits for media to be encoded
    has_new_line: bool = False  # in the output so far
    speculative: bool = False  # it may have drafts
    task: Task | None = None  # of an idle slot: the last one


@attrs.frozen(kw_only=True)
class WaitingStatus:
    """A look at one task in the queue, taken between two steps."""

    task_id: int
    position: int  # 1 is the next one
    n_prompt: int
    priority: int
    waited_s: float
    #: How long it goes on waiting, by the pace of late; none while no pace is known.
    wait_s: float | None = None
    adapters: Adapters = ()


#: Of the counters below, those that are not added up over time.
_NOW = frozenset({"n_cells", "n_cells_used", "n_cells_running", "threads", "threads_batch"})


@attrs.frozen(kw_only=True)
class EngineCounters:
    """What an engine has done since its start, or what is so now. Times are in seconds."""

    steps: int = 0
    step_s: float = 0.0
    decodes: int = 0  # batches that were computed
    busy_slots: int = 0  # slots in them, added up
    prompt_tokens: int = 0  # prefilled
    prompt_s: float = 0.0  # in steps that prefilled
    prompt_queries: int = 0  # tokens of prompts that were admitted
    cached_tokens: int = 0  # of these, found in the KV cache or in RAM
    predicted_tokens: int = 0
    n_tokens_max: int = 0  # the longest sequence so far
    drafts: int = 0  # that were checked
    draft_tokens: int = 0  # in them
    accepted_tokens: int = 0  # of these, right
    n_cells: int = 0  # of the KV cache
    n_cells_used: int = 0  # now, also by what is only kept
    n_cells_running: int = 0  # now, by requests in slots
    threads: int = 0  # now, of batches with few tokens
    threads_batch: int = 0  # now, of batches with many
    thread_changes: int = 0
    media_chunks: int = 0  # images, parts of them, and windows of sound that were encoded
    media_s: float = 0.0  # in which the encoder worked

    def after(self, earlier: EngineCounters) -> EngineCounters:
        """Go on with the counts of an engine that ran before this one."""
        sums = {
            name: value + getattr(earlier, name)
            for name, value in attrs.asdict(self).items()
            if name not in _NOW
        }
        longest = max(self.n_tokens_max, earlier.n_tokens_max)
        return attrs.evolve(self, **{**sums, "n_tokens_max": longest})


@attrs.frozen
class StepRecord:
    """What one step of an engine did. A step without a batch has zeros for what is in one."""

    index: int  # of the records of a server, from 1; one that is missing was lost
    began: float
    ms: float
    n_slots: int  # with something in the batch
    n_decode: int  # tokens of outputs in it, with those of drafts
    n_prefill: int  # tokens of prompts in it
    n_running: int  # requests with a slot, after the step
    n_waiting: int  # requests in the queue

    @property
    def n_tokens(self) -> int:
        """The size of the batch."""
        return self.n_decode + self.n_prefill


@attrs.frozen(kw_only=True)
class EngineStatus:
    """A look at the engine, taken between two steps."""

    slots: tuple[SlotStatus, ...]
    waiting: tuple[WaitingStatus, ...]  # the tasks in the queue, next one first
    counters: EngineCounters = attrs.field(factory=EngineCounters)
