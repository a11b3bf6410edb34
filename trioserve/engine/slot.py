"""A slot, and the state of the request that it runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from time import monotonic

import attrs

from trioserve.engine.backend import Sampler
from trioserve.engine.cache.prefix_cache import next_checkpoint
from trioserve.engine.cache.sequences import KVSequence
from trioserve.engine.detokenizer import Detokenizer, IndentStop
from trioserve.engine.queue import QueuedRequest
from trioserve.engine.reasoning import ReasoningTracker
from trioserve.errors import PermissionDeniedError
from trioserve.types import (
    CacheRoot,
    CellKey,
    Finished,
    FinishReason,
    MediaChunk,
    Progress,
    PromptScores,
    SlotStatus,
    SlotTask,
    Task,
    Timings,
    TokenId,
    TokenProbs,
)
from trioserve.types.media import whole_chunks
from trioserve.types.params import INT32_MAX
from trioserve.types.task import shared_length


@attrs.define(eq=False, repr=False)
class RequestState(QueuedRequest):
    """The state of a task that outlives its slot.

    ::

        keys   | prompt ............ | output ......... |
               0              n_prompt          len(keys)

    A key identifies the content of a KV cell: for a token, it is its id. A KV sequence holds a
    beginning of `keys`. The rest is still to be decoded: the prompt in prefill, the newest token in
    decode, both after a preemption. In decode, a draft follows the newest token; the tokens of it
    that the sampler accepts are added to `keys`.
    """

    task: Task
    keys: list[CellKey] = attrs.field(init=False)
    n_prompt: int = attrs.field(init=False)
    #: It gets what others leave; see `Background`.
    is_background: bool = attrs.field(init=False)
    n_discarded: int = 0  # keys that `shift` took out
    #: While there are fewer keys, the next one needs no checks; see `Outputs.step`.
    n_simple: int = 0
    #: Lengths at which the prefill stops for a checkpoint.
    checkpoints: list[int] = attrs.field(factory=list)
    #: Guesses of the tokens that come next. The next step decodes them after the newest key.
    draft: list[TokenId] = attrs.field(factory=list)
    #: Tokens at its end that are no guesses, but make it as long as others.
    n_padded: int = 0
    #: Tokens before the newest one, which are not decoded yet either: forced, or taken back.
    n_ahead: int = 0
    n_drafts: int = 0  # that were checked
    n_drafted: int = 0  # tokens in them
    n_accepted: int = 0  # of these, right
    sampler: Sampler | None = None
    text: Detokenizer = attrs.field(init=False)
    indent_stop: IndentStop | None = None
    #: The next tokens, in place of sampled ones.
    forced: deque[TokenId] = attrs.field(factory=deque)
    reasoning: ReasoningTracker | None = None
    unsent_tokens: list[TokenId] = attrs.field(factory=list)
    unsent_probs: list[TokenProbs] = attrs.field(factory=list)
    #: Of the tokens of the prompt, as far as they are known; None: no scores are asked for.
    scores: PromptScores | None = None
    has_sent_scores: bool = False
    n_sought: int = -1  # prompts with kept scores when these were searched
    #: With fewer tokens of output, it keeps the cells that others have made room for.
    safe_until: int = 0
    paused: bool = False  # its reader stalls
    is_fetching: bool = False  # its beginning is being read from disk
    truncated: bool = False
    has_new_line: bool = False
    finish_reason: FinishReason | None = None
    cached: int = 0  # prompt tokens found in the KV cache at the first admission
    prefilled: int = 0  # prompt tokens prefilled before the first output
    n_reported: int = -1  # batches of the prompt in the last report of progress
    first_token_at: float | None = None
    last_token_at: float | None = None
    _shared: dict[int, int] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        task, params = self.task, self.task.params
        self.keys = list(task.prompt.keys)
        self.n_prompt = len(task.prompt)
        self.is_background = task.priority < 0
        self.text = Detokenizer((*params.stop, *task.turn_ends), task.aside)
        self.indent_stop = IndentStop(params.n_indent) if params.n_indent else None
        self.reasoning = ReasoningTracker(task.budget) if task.budget is not None else None
        self.close_thinking()  # a budget of 0 may be used up by the prompt

    @property
    def tokens(self) -> Sequence[TokenId]:
        """Its text so far, without media: the prompt and the output."""
        prompt = self.task.prompt
        return [*prompt.tokens, *self.keys[self.n_prompt :]] if prompt.media else self.keys

    @property
    def n_output(self) -> int:
        return len(self.keys) + self.n_discarded - self.n_prompt

    @property
    def is_safe(self) -> bool:
        """True while it is not preempted, because others have just made room for it."""
        return self.n_output < self.safe_until

    @property
    def n_cells(self) -> int:
        """The cells of its tokens, and one more."""
        return len(self.keys) + 1

    @property
    def n_more(self) -> int:
        """The number of tokens that a step decodes in decode, beside the newest one."""
        return self.n_ahead + len(self.draft)

    @property
    def next_score(self) -> int:
        """The next cell whose logits give a score; all before it have given theirs.

        The last cell of the prompt, which gives none, stands for the end.
        """
        return self.n_prompt - 1 if self.scores is None else len(self.scores)

    @property
    def n_reusable(self) -> int:
        """The most cells to take from the cache: those without logits to compute; -1: none."""
        if not self.task.params.cache_prompt:
            return -1
        n_scored = self.next_score
        return n_scored or -1 if n_scored < self.n_prompt - 1 else len(self.keys) - 1

    @property
    def is_plain(self) -> bool:
        """True if sampling gives one token, and nothing else decides what it is."""
        params = self.task.params
        return not (self.draft or self.forced or params.n_probs or self.task.constraint is not None)

    @property
    def n_plain(self) -> int:
        """The number of next tokens that `Outputs.step` may add without a closer look."""
        if self.unsent_tokens or self.text.tail or not self.is_plain:
            return 0
        return max(0, self.n_simple - len(self.keys))

    @property
    def n_left(self) -> int:
        n_max = self.task.params.max_tokens
        return n_max - self.n_output if n_max >= 0 else INT32_MAX

    @property
    def is_free(self) -> bool:
        """True if no more reasoning may have to be closed, so that the sampler alone chooses."""
        return self.reasoning is None or self.reasoning.is_over

    def shift(self, n_ctx: int, n_bos: int) -> int:
        """Discard `n_discard` tokens after the first ones, or half of the rest.

        ::

            | keep | discarded | newer ones |  becomes  | keep | newer ones |

        Returns how many are kept at the beginning: `n_keep`, and BOS tokens.
        """
        params = self.task.params
        n_keep = self.n_prompt if params.n_keep < 0 else params.n_keep + n_bos
        n_keep = min(n_keep, n_ctx - 4)
        n_left = len(self.keys) - n_keep
        n_discard = min(params.n_discard or max(1, n_left // 2), n_left - 1)
        del self.keys[n_keep : n_keep + n_discard]
        self.checkpoints = []
        self.n_discarded += n_discard
        self.n_ahead = 0
        self.n_simple = 0
        self.truncated = True
        return n_keep

    def close_thinking(self) -> None:
        """Force the end of the reasoning, if it has to end now."""
        if self.reasoning is not None and self.text.is_whole:
            self.forced += self.reasoning.closing()

    def shared_with(self, leader: RequestState) -> int:
        """Count the leading cells of both prompts, at most all but the last of this one.

        Chunks of media count whole or not at all.
        """
        shared = self._shared.get(leader.task.id)
        if shared is None:
            shared = shared_length(self.keys[:-1], leader.keys[: leader.n_prompt])
            shared = whole_chunks(self.keys, shared)
            self._shared[leader.task.id] = shared
        return shared

    def attach(self, seq: int) -> None:
        """Let decodes of its sequence sample, if there are no probabilities and no reasoning."""
        if self.sampler is not None and not self.task.params.n_probs and self.reasoning is None:
            self.sampler.attach(seq)

    def close(self) -> None:
        """End it, and free the sampler. Closing twice is fine."""
        self.n_simple = 0
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def progress(self, n_held: int, n_batch: int) -> Progress | None:
        """Report how much of the prompt is computed, if the task asks for it and a report is due.

        A report is due as the prompt begins, after each `n_batch` tokens, and at its end, whatever
        the number of steps: a client gets as many reports as llama-server sends.
        """
        if not self.task.params.return_progress:
            return None
        n_batches = (n_held - self.cached) // n_batch
        if n_batches <= self.n_reported and n_held < self.n_prompt:
            return None
        is_first, self.n_reported = self.n_reported < 0, n_batches
        elapsed = 0.0 if is_first else monotonic() - (self.admitted_at or self.submitted_at)
        return Progress(self.task.id, self.n_prompt, self.cached, n_held, elapsed * 1e3)

    def finished(self, slot_id: int) -> Finished:
        assert self.finish_reason is not None
        task, reason, word = self.task, self.finish_reason, self.text.stopping_word
        if word in task.turn_ends and word not in task.params.stop:
            reason, word = FinishReason.EOS, ""
        return Finished(
            task_id=task.id,
            reason=reason,
            stopping_word=word,
            timings=self.timings(),
            truncated=self.truncated,
            slot_id=slot_id,
        )

    def timings(self) -> Timings:
        admitted = self.admitted_at or monotonic()
        first = self.first_token_at or monotonic()
        last = self.last_token_at or first
        return Timings(
            queue_ms=self.queue_ms,
            cache_n=self.cached,
            prompt_n=self.prefilled,
            prompt_ms=(first - admitted) * 1e3,
            predicted_n=self.n_output,
            predicted_ms=(last - first) * 1e3,
            draft_n=self.n_drafted,
            draft_n_accepted=self.n_accepted,
        )


@attrs.define(eq=False, repr=False)
class Slot:
    """One slot, and the KV sequence that its request was given.

    ::

        request.keys, request.draft | seq.held ........... | pending ..... |
                            0          len(seq.held)
    """

    id: int
    request: RequestState | None = None
    seq: KVSequence | None = None
    in_decode: bool = False  # the request has logits to sample from: one token a step
    awaits_media: bool = False  # its prompt has reached a chunk that is not encoded yet
    last_used: int = 0  # the step in which it was last given up
    last_task: SlotTask | None = None
    #: While it is idle: the keys of its last text, and their root. Its sequence may hold another
    #: text by now; the prefix cache knows which of the keys are still cached.
    kept: list[CellKey] = attrs.field(factory=list)
    root: CacheRoot = attrs.field(factory=CacheRoot)

    @property
    def decodes(self) -> bool:
        """True if each step adds a token to its request."""
        return self.request is not None and self.in_decode and not self.request.paused

    @property
    def n_held(self) -> int:
        return 0 if self.seq is None else len(self.seq.held)

    @property
    def n_pending(self) -> int:
        """The number of cells of its request that are still to be decoded."""
        request = self.request
        return 0 if request is None else len(request.keys) + len(request.draft) - self.n_held

    def room_for_draft(self, n_ctx: int) -> int:
        """The most tokens of a draft in decode, in a sequence of `n_ctx` tokens.

        None while the next token is forced, or reasoning may have to be closed.
        """
        request = self.request
        assert request is not None and self.in_decode
        return 0 if request.forced or not request.is_free else max(0, n_ctx - len(request.keys) - 1)

    def up_to_scores(self, n_rows: int) -> tuple[int, int]:
        """The most cells of a prompt in a step, if that many rows are left for scores.

        Returns them, and the rows that are left then.
        """
        request = self.request
        assert request is not None
        n_cells, first = self.n_alike, request.next_score
        end = min(self.n_held + n_cells, request.n_prompt - 1)
        if end - first > n_rows:
            return first + n_rows - self.n_held, 0
        return n_cells, n_rows - max(0, end - first)

    def up_to_checkpoint(self, n_cells: int) -> int:
        """Shorten a chunk of the prompt to end where a checkpoint is made."""
        if self.request is None or not self.request.checkpoints:
            return n_cells
        checkpoint = next_checkpoint(self.request.checkpoints, self.n_held)
        return n_cells if checkpoint is None else min(n_cells, checkpoint - self.n_held)

    # -- media in the prompt

    def _span(self) -> tuple[int, MediaChunk] | None:
        """Find the chunk that its next cell is of, or else the next one, and where it begins."""
        return None if self.request is None else self.request.task.prompt.span_from(self.n_held)

    def media_now(self) -> MediaChunk | None:
        """Return the chunk that its next cell is of; None: that is a token."""
        span = self._span()
        return span[1] if span is not None and span[0] <= self.n_held else None

    def media_ahead(self) -> list[MediaChunk]:
        """List the chunks of the prompt that are not held whole, unless the request is paused."""
        request = self.request
        if request is None or request.paused or self.in_decode:
            return []
        spans = request.task.prompt.spans
        return [chunk for start, chunk in spans if start + chunk.n_cells > self.n_held]

    @property
    def is_at_media(self) -> bool:
        return self.media_now() is not None

    @property
    def n_alike(self) -> int:
        """The most cells of a prompt in a step: tokens up to media, or media to their end."""
        span = self._span()
        if span is None:
            return self.n_pending
        start, chunk = span
        return (start if start > self.n_held else start + chunk.n_cells) - self.n_held

    def take(self, request: RequestState, seq: KVSequence) -> None:
        """Start a request in a sequence that holds a beginning of it."""
        assert self.request is None
        assert len(seq.held) < len(request.keys), "one cell must be decoded, to have logits"
        self.request, self.seq = request, seq
        self.in_decode = self.awaits_media = False
        task = request.task
        self.kept, self.last_task = [], SlotTask(task.id, task.params, task.root)

    def give_up(self, step: int) -> tuple[RequestState, KVSequence]:
        """Take the request out, and its sequence."""
        assert self.request is not None and self.seq is not None
        request, seq = self.request, self.seq
        self.request = self.seq = None
        request.draft, request.n_ahead = [], 0
        if request.sampler is not None:
            request.sampler.detach()
        self.in_decode = self.awaits_media = False
        self.last_used = step
        return request, seq

    def check_owner(self, owner: str) -> None:
        """Raise PermissionDeniedError if the idle slot's text belongs to another owner."""
        assert self.request is None
        if self.kept and self.root.owner != owner:
            raise PermissionDeniedError("The slot holds the text of another API key.")

    def status(self, n_ctx: int, *, speculative: bool = False) -> SlotStatus:
        status = SlotStatus(
            id=self.id,
            state="idle",
            n_ctx=n_ctx,
            n_past=len(self.kept),
            speculative=speculative,
            task=self.last_task,
        )
        if (request := self.request) is None:
            return status
        return attrs.evolve(
            status,
            state="decode" if self.in_decode else "prefill",
            task_id=request.task.id,
            n_prompt=request.n_prompt,
            n_past=self.n_held,
            n_cached=request.cached,
            n_decoded=request.n_output,
            paused=request.paused,
            encoding=self.awaits_media,
            has_new_line=request.has_new_line,
        )


def arrival(slot: Slot) -> int:
    """Order busy slots by the arrival of their requests."""
    assert slot.request is not None
    return slot.request.task.id


def lowest_priority(slots: list[Slot]) -> Slot:
    """Find the slot that matters least: a paused request, or one of lowest priority.

    Among those, it is the youngest of the client with the most cells for its weight, but none that
    others have just made room for.
    """
    shares = defaultdict[str, float](float)
    for slot in slots:
        if (one := slot.request) is not None:
            shares[one.task.client] += one.n_cells / one.task.weight

    def importance(slot: Slot) -> tuple[bool, int, bool, float, int]:
        request = slot.request
        assert request is not None
        priority, share = request.task.priority, shares[request.task.client]
        return not request.paused, priority, request.is_safe, -share, -arrival(slot)

    return min(slots, key=importance)
