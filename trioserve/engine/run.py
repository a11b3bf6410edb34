"""A task on its way through the engine: what it has produced, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

import attrs

from trioserve.engine.backend import Sampler
from trioserve.engine.text.detokenizer import Detokenizer
from trioserve.engine.text.indent import IndentStop
from trioserve.engine.text.reasoning import ReasoningTracker
from trioserve.types import (
    CellKey,
    Chunk,
    Finished,
    FinishReason,
    Progress,
    Task,
    Timings,
    TokenId,
    TokenProbs,
    WaitingStatus,
)
from trioserve.types.media import whole_chunks
from trioserve.types.params import INT32_MAX
from trioserve.types.task import shared_length


class Run:
    """The state of a task that outlives its slot.

    ::

        keys   | prompt ............ | output ......... |
               0              n_prompt          len(keys)

    A key says what a cell of the KV cache holds: for a token, its id. A KV sequence holds a
    beginning of `keys`. The rest is still to be decoded:
    the prompt in prefill, the one newest token in decode, both after a preemption. In decode, a
    draft comes after the newest token; what the sampler accepts of it becomes part of `keys`.
    """

    __slots__ = (
        "_shared",
        "admitted_at",
        "cached",
        "draft",
        "finish_reason",
        "first_in_line",
        "first_token_at",
        "forced",
        "has_new_line",
        "indent_stop",
        "keys",
        "last_token_at",
        "n_accepted",
        "n_ahead",
        "n_discarded",
        "n_drafted",
        "n_drafts",
        "n_prompt",
        "n_reported",
        "n_simple",
        "paused",
        "places",
        "prefilled",
        "reasoning",
        "sampler",
        "submitted_at",
        "task",
        "text",
        "truncated",
        "unsent_probs",
        "unsent_tokens",
    )

    def __init__(self, task: Task) -> None:
        self.task = task
        self.keys: list[CellKey] = list(task.prompt.keys)
        self.n_prompt = len(task.prompt)
        self.n_discarded = 0  # keys that `shift` took out
        #: While there are fewer keys, the next one needs no closer look; see `Outputs.step`.
        self.n_simple = 0
        #: Lengths at which the prefill stops for a checkpoint.
        self.places: list[int] = []
        #: Guesses of the tokens that come next. The next step decodes them after the newest key.
        self.draft: list[TokenId] = []
        #: Tokens before the newest one that had to come, so that they are not decoded either.
        self.n_ahead = 0
        self.n_drafts = 0  # that were checked
        self.n_drafted = self.n_accepted = 0  # tokens in them; of these, right
        self.sampler: Sampler | None = None
        self.text = Detokenizer(task.params.stop)
        n_indent = task.params.n_indent
        self.indent_stop = IndentStop(n_indent) if n_indent else None
        #: What comes next, instead of what would be sampled.
        self.forced: deque[TokenId] = deque()
        self.reasoning = ReasoningTracker(task.budget) if task.budget is not None else None
        self.close_thinking()  # a budget of 0 may be used up by the prompt
        self.unsent_tokens: list[TokenId] = []
        self.unsent_probs: list[TokenProbs] = []
        self.paused = False  # its reader stalls
        self.first_in_line = False  # in the queue: it was preempted for want of room
        self.truncated = False
        self.has_new_line = False
        self.finish_reason: FinishReason | None = None
        self.cached = 0  # prompt tokens found in the KV cache at the first admission
        self.prefilled = 0  # prompt tokens prefilled before the first output
        self.n_reported = -1  # batches of the prompt in the last report of progress
        self.submitted_at = monotonic()
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._shared: dict[int, int] = {}

    @property
    def tokens(self) -> Sequence[TokenId]:
        """Its text so far, without media: the prompt and the output."""
        prompt = self.task.prompt
        return [*prompt.tokens, *self.keys[self.n_prompt :]] if prompt.media else self.keys

    @property
    def n_output(self) -> int:
        """How many tokens were generated."""
        return len(self.keys) + self.n_discarded - self.n_prompt

    @property
    def n_more(self) -> int:
        """How many tokens a step decodes in decode, beside the newest one."""
        return self.n_ahead + len(self.draft)

    @property
    def n_left(self) -> int:
        """How many tokens the output may still have."""
        n_max = self.task.params.max_tokens
        return n_max - self.n_output if n_max >= 0 else INT32_MAX

    @property
    def is_free(self) -> bool:
        """Whether no more reasoning may have to be closed, so that the sampler alone chooses."""
        return self.reasoning is None or self.reasoning.is_over

    def shift(self, n_ctx: int, n_bos: int) -> int:
        """Take out `n_discard` tokens after the first ones, or half, to go on without them.

        ::

            | keep | discarded | newer ones |  becomes  | keep | newer ones |

        Returns how many are kept at the beginning: `n_keep`, and those that begin any text.
        """
        params = self.task.params
        n_keep = self.n_prompt if params.n_keep < 0 else params.n_keep + n_bos
        n_keep = min(n_keep, n_ctx - 4)
        n_left = len(self.keys) - n_keep
        n_discard = min(params.n_discard or max(1, n_left // 2), n_left - 1)
        del self.keys[n_keep : n_keep + n_discard]
        self.places = []
        self.n_discarded += n_discard
        self.n_ahead = 0
        self.n_simple = 0
        self.truncated = True
        return n_keep

    def close_thinking(self) -> None:
        """Have the output go on with the end of its reasoning, if that has to end now."""
        if self.reasoning is not None and self.text.is_whole:
            self.forced += self.reasoning.closing()

    def shared_with(self, leader: Run) -> int:
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
        """Let decodes of the run's sequence sample, if nothing else is to choose or to be told."""
        if self.sampler is not None and not self.task.params.n_probs and self.reasoning is None:
            self.sampler.attach(seq)

    def close(self) -> None:
        """Free the sampler. Closing twice is fine."""
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def waiting_status(self, position: int, now: float) -> WaitingStatus:
        """Describe the run in the queue; `now` is monotonic."""
        return WaitingStatus(
            task_id=self.task.id,
            position=position,
            n_prompt=self.n_prompt,
            priority=self.task.priority,
            waited_s=now - self.submitted_at,
            adapters=self.task.root.adapters,
        )

    def progress(self, n_held: int, n_batch: int) -> Progress | None:
        """Say how much of the prompt is there, if the task asks for it, and it is due.

        That is as the prompt begins, after each batch of it, however many steps that took, and at
        its end: a client counts as many reports as llama-server sends.
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
        """Describe the end of the output, which a slot came to."""
        assert self.finish_reason is not None
        return Finished(
            task_id=self.task.id,
            reason=self.finish_reason,
            stopping_word=self.text.stopping_word,
            timings=self.timings(),
            truncated=self.truncated,
            slot_id=slot_id,
        )

    def with_drafts(self, chunk: Chunk) -> Chunk:
        """Tell the reader of a chunk what became of the drafts so far."""
        if not self.n_drafted:
            return chunk
        return attrs.evolve(chunk, drafts=(self.n_drafted, self.n_accepted))

    def timings(self) -> Timings:
        """Sum up the times so far."""
        admitted = self.admitted_at or monotonic()
        first = self.first_token_at or monotonic()
        last = self.last_token_at or first
        return Timings(
            queue_ms=(admitted - self.submitted_at) * 1e3,
            cache_n=self.cached,
            prompt_n=self.prefilled,
            prompt_ms=(first - admitted) * 1e3,
            predicted_n=self.n_output,
            predicted_ms=(last - first) * 1e3,
            draft_n=self.n_drafted,
            draft_n_accepted=self.n_accepted,
        )
