"""The engine: one thread that takes tasks, runs steps, and hands out what they produce.

A step is schedule, run, postprocess: decide, decode one batch, sample. Everything but
`Engine.run` is synchronous code that a test can call.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from trioserve.engine.backend import Backend
from trioserve.engine.cache.prefix_cache import DEFAULT_RULES, CheckpointRules, PrefixCache
from trioserve.engine.counters import Counters
from trioserve.engine.decoder import BatchDecoder
from trioserve.engine.drafts.drafts import Drafts
from trioserve.engine.encoder import Encoded, MediaEncoder
from trioserve.engine.loop import (
    Call,
    Cancel,
    Command,
    Pause,
    Resume,
    SlotCall,
    Stop,
    Submit,
)
from trioserve.engine.output import Outputs, Sampled, SampledToken, SamplerPool
from trioserve.engine.planner import Planner, StepPlan
from trioserve.engine.scheduler import Scheduler
from trioserve.engine.slot import RequestState, Slot, lowest_priority
from trioserve.engine.slot_calls import SlotCalls, SlotLoop
from trioserve.engine.strategy import BatchStrategy
from trioserve.engine.task_check import check_task
from trioserve.errors import (
    DecodeError,
    DecodeInterruptedError,
    EngineError,
    KVCacheFullError,
    NotSupportedError,
    TrioServeError,
)
from trioserve.types import (
    Admitted,
    Constraint,
    EmbeddingTask,
    EngineStatus,
    Failed,
    FinishReason,
    Grammar,
    MediaChunk,
    Preempted,
    Task,
)


class Engine(SlotLoop):
    """Runs tasks on a backend with slots and continuous batching.

    Args:
        backend: the model. The engine owns it, and closes it when its thread ends.
        strategy: how a step is shared between decode and prefill.
        cache_ram: bytes of RAM for what leaves the KV cache.
        max_idle: cells of a unified KV cache that may hold what no request uses, while some run;
            the rest goes to RAM. None: any number.
        checkpoints: how many there may be, where sequences cannot be cut.
        context_shift: go on in a full context without its older half, rather than end. A text with
            media ends.
        notify, flush_interval: as a `Loop` has them. A task's first and last token leave at once.
    """

    def __init__(
        self,
        backend: Backend,
        strategy: BatchStrategy,
        notify: Callable[[], None],
        *,
        cache_ram: int = 0,
        max_idle: int | None = None,
        checkpoints: CheckpointRules = DEFAULT_RULES,
        context_shift: bool = False,
        flush_interval: float = 0.0,
    ) -> None:
        super().__init__(backend, notify, flush_interval=flush_interval)
        self.adapters = backend.adapters
        self._backend = backend
        #: Makes embeddings of media; None: the model takes text only.
        self.encoder: MediaEncoder | None = None
        if backend.projector is not None:
            self.encoder = MediaEncoder(backend.projector, self.inbox.put)
        cache = PrefixCache(backend, cache_ram, max_idle=max_idle, checkpoints=checkpoints)
        planner = Planner(
            strategy,
            n_batch=backend.n_batch,
            unified=cache.unified,
            has_adapters=bool(backend.adapters),
            encoder=self.encoder,
        )
        self._scheduler = Scheduler(
            n_slots=backend.n_slots,
            n_ctx=backend.n_ctx,
            n_ctx_seq=backend.n_ctx_seq,
            n_batch=backend.n_batch,
            n_outputs=backend.n_outputs,
            cache=cache,
            planner=planner,
        )
        self.drafts = Drafts(self._scheduler, backend.drafters)
        self._decoder = BatchDecoder(backend, self.encoder)
        self._slot_calls = SlotCalls()
        self._strategy = strategy
        strategy.begin(unified=self._scheduler.cache.unified)
        self._outputs = Outputs(self.vocab, self.n_ctx_seq, shifts=context_shift)
        self._samplers = SamplerPool(backend)
        self._counters = Counters()

    # -- from any thread

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether `Prompt.divergence_points` help: sequences cannot be cut, and some are kept."""
        return self._scheduler.cache.can_share and not self._backend.can_cut

    def cancel(self, task_id: int) -> None:
        """Drop a task. A decode that is for its prompt ends within milliseconds."""
        super().cancel(task_id)
        self._decoder.cancel(task_id)

    def end_thinking(self, task_id: int) -> bool:
        """Have a task close the reasoning that it is in. From the inference thread.

        Returns whether it runs, with a budget; one that is not in its reasoning goes on as it is.
        """
        request = self._scheduler.find(task_id)
        if request is None or request.reasoning is None:
            return False
        request.reasoning.end()
        request.close_thinking()
        return True

    def compile(self, grammar: Grammar, owner: str = "") -> Constraint:
        """Compile a grammar for `Task.constraint`; see `Backend.compile`. In a worker thread."""
        return self._backend.compile(grammar, owner)

    def check(self, task: Task | EmbeddingTask) -> None:
        """Refuse a task that can never run; raises what `submit` raises."""
        self.check_works()
        if not isinstance(task, Task):
            raise NotSupportedError("This engine makes text, and no embeddings.")
        check_task(task, self._backend)

    # -- on the inference thread

    @property
    def has_work(self) -> bool:
        """Whether a task runs or waits."""
        return self._scheduler.has_work

    def _close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()
        for request in self._scheduler.requests():
            request.close()
        self._samplers.close()
        self._decoder.threads.close()
        self.drafts.close()
        self._backend.close()

    def _step(self) -> None:
        self.drafts.propose()
        plan = self._scheduler.schedule()
        for request in self._scheduler.take_preempted():
            self._emit(Preempted(request.task.id))
        for slot, request in self._scheduler.take_admitted():
            self._note_admission(slot, request)
        rows = self._decode(plan) if plan else []
        if rows and self.watchers:
            self._note_batch(plan)
        if rows:
            self._postprocess(plan, rows)
        seconds = self.clock() - self.heartbeat
        self._counters.count_step(seconds)
        if rows:
            self._learn(plan, seconds)
        if self._slot_calls.waiting:
            self._slot_calls.make(self._scheduler.slots)
        if self.encoder is not None and not self.has_work:
            self._decoder.threads.rest()

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """Count what this step has done, and tell the strategy what it has cost."""
        self._counters.count_decode(len(plan), plan.n_prefill, seconds)
        self._scheduler.planner.observe(plan, seconds)
        self.drafts.observe(plan, seconds)

    # -- commands

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(Task() as task) if self.failure is None:
                self._scheduler.add(RequestState(task))
            case Submit(task) if self.failure is not None:
                self._emit(Failed(task.id, self.failure))
            case Cancel(task_id):
                request = self._scheduler.remove(task_id)
                self._retract(task_id)  # it may have failed since the last step
                if request is not None:
                    self._end(request)
                    self._slot_calls.make(self._scheduler.slots)
                    if not self._scheduler.has_work:
                        self._scheduler.ask_for_media()
            case Pause(task_id) | Resume(task_id):
                self._scheduler.pause(task_id, isinstance(command, Pause))
            case Call(function):
                function()
            case SlotCall():
                self._slot_calls.waiting.append(command)
                self._slot_calls.make(self._scheduler.slots)
            case Encoded(chunk, error):
                self._go_on_with(chunk, error)
            case Stop():
                self._stopping = True

    def _go_on_with(self, chunk: MediaChunk, error: TrioServeError | None) -> None:
        """Let requests go on that have waited for a chunk, or end them if it cannot be encoded."""
        for slot in self._scheduler.slots:
            slot.awaits_media = False  # until the next step, which looks again
            if error is not None and slot.needs(chunk):
                request = self._scheduler.release(slot)
                self._end(request)
                self._emit(Failed(request.task.id, error))
        if error is not None and self.encoder is not None:
            self._scheduler.ask_for_media()
            self.encoder.settle(chunk)

    # -- one step: run

    def _decode(self, plan: StepPlan) -> list[int]:
        """Decode one batch; returns the row to sample from of each slot, none if it failed."""
        try:
            return self._decoder.decode(plan, self._scheduler.planner.adapters)
        except DecodeInterruptedError:
            pass  # the cancel that it was for comes before the next step
        except KVCacheFullError as error:
            self._make_room(plan.slots, error)
        except DecodeError as error:
            for slot in plan.slots:
                self._fail(slot, error)
        return []

    def _make_room(self, slots: list[Slot], error: KVCacheFullError) -> None:
        """The KV cache had no room: drop drafts, or send a request back, or fail the only one.

        Nothing was decoded, so the requests are as they were and the next step tries again.
        """
        if self._scheduler.drop_drafts():
            return
        if len(slots) > 1:
            self._scheduler.preempt(lowest_priority(slots))
        else:
            self._fail(slots[0], error)

    # -- one step: postprocess

    def _postprocess(self, plan: StepPlan, rows: list[int]) -> None:
        """Note what was decoded, and go on where there are logits."""
        plan.note(self._scheduler.cache)
        n_rows = len(plan.decode_rows.slots)
        ready = list(plan.decode_rows.slots)
        ready_rows = rows[:n_rows]
        for piece, row in zip(plan.others, rows[n_rows:], strict=True):
            slot, request = piece.slot, piece.slot.request
            assert request is not None
            if not piece.in_decode:
                self._note_prefill(slot, request, piece.n_cells)
                self._scheduler.note_prefill(slot)
            if piece.in_decode or (slot.n_pending == 0 and self._begins_output(slot, request)):
                ready.append(slot)
                ready_rows.append(row)
        self._go_on(ready, ready_rows)

    def _go_on(self, slots: list[Slot], rows: list[int]) -> None:
        """Sample for slots, each from its row of logits, and add that to their outputs."""
        requests = [request for slot in slots if (request := slot.request) is not None]
        sampled = self._samplers.sample(requests, rows)
        self._outputs.pace = self._strategy.pace
        chunks, others = self._outputs.step(requests, sampled)
        if chunks.task_ids:
            self._fresh.append(chunks)
        for i in others:
            self._next_tokens(slots[i], requests[i], sampled[i])

    def _begins_output(self, slot: Slot, request: RequestState) -> bool:
        """Put a slot into decode, with a sampler; ends a request that is to have no output."""
        slot.in_decode = True
        task = request.task
        if task.params.max_tokens == 0:
            request.finish_reason = FinishReason.LIMIT
            self._finish(slot, request)
        elif request.sampler is None:
            try:
                request.sampler = self._backend.sampler(
                    task.params.sampling, task.prompt.tokens, task.constraint
                )
            except TrioServeError as error:
                self._fail(slot, error)
        if slot.seq is not None:
            request.attach(slot.seq.id)
        return request.sampler is not None

    def _note_admission(self, slot: Slot, request: RequestState) -> None:
        if request.admitted_at is None:
            request.admitted_at = self.heartbeat
            request.cached = slot.n_held
            self._counters.count_admission(request)
            if progress := request.progress(slot.n_held, self._backend.n_batch):
                self._emit(progress)
        self._emit(Admitted(request.task.id, (request.admitted_at - request.submitted_at) * 1e3))

    def _note_prefill(self, slot: Slot, request: RequestState, n_cells: int) -> None:
        if request.n_output:
            return  # preempted or shifted: this is not the prompt's first time
        request.prefilled += n_cells
        if progress := request.progress(slot.n_held, self._backend.n_batch):
            self._emit(progress)

    def _next_tokens(self, slot: Slot, request: RequestState, sampled: Sampled) -> None:
        """Add what was sampled to a request, and end the request if it is complete, or failed."""
        if isinstance(sampled, TrioServeError):
            self._fail(slot, sampled)
            return
        sampled = [SampledToken(sampled)] if isinstance(sampled, int) else sampled
        n_before = len(request.keys)
        chunk = self._outputs.accept(request, sampled)
        new = request.keys[n_before:]
        n_right = self.drafts.settle(slot, new[: len(sampled) - 1]) if request.draft else 0
        request.n_ahead = max(0, len(new) - n_right - 1)
        if chunk is not None:
            self._fresh.append(request.with_drafts(chunk))
            if len(chunk.tokens) == request.n_output:
                self._urgent = self._is_first = True
        if request.finish_reason is not None:
            self._finish(slot, request)
        elif len(request.keys) >= self.n_ctx_seq:
            self._shift(slot, request)

    def _shift(self, slot: Slot, request: RequestState) -> None:
        """Make room in a full context. What is left is prefilled anew, at its new positions.

        Moving the positions in the KV cache would be quicker, but other sequences may share the
        cells, and the result would depend on tokens that are gone.
        """
        assert slot.seq is not None
        n_keep = request.shift(self.n_ctx_seq, int(self.info.add_bos))
        self._scheduler.cache.cut(slot.seq, n_keep if self._backend.can_cut else 0)
        slot.in_decode = False

    def _finish(self, slot: Slot, request: RequestState) -> None:
        self._scheduler.release(slot)
        self._end(request)
        self._emit(request.finished(slot.id))

    def _end(self, request: RequestState) -> None:
        """Free what a request has that is over, and count it."""
        request.close()
        self._counters.count_end(request)

    def _fail(self, slot: Slot, error: TrioServeError) -> None:
        """End the request of a slot with an error, and forget its KV cache."""
        request = self._scheduler.discard(slot)
        self._end(request)
        self._emit(Failed(request.task.id, error))

    def _fail_all(self, error: EngineError) -> None:
        for request in list(self._scheduler.requests()):
            self._scheduler.remove(request.task.id)
            self._end(request)
            self._emit(Failed(request.task.id, error))

    def status(self) -> EngineStatus:
        """Describe the slots and the queue. Use it through `call`."""
        n_ctx, drafts, now = self.n_ctx_seq, self.drafts.is_on, monotonic()
        return EngineStatus(
            slots=tuple(one.status(n_ctx, speculative=drafts) for one in self._scheduler.slots),
            waiting=tuple(
                request.waiting_status(position, now)
                for position, request in enumerate(self._scheduler.queue(), start=1)
            ),
            counters=self._counters.status(self._scheduler, self._decoder.threads),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, cache and backend agree on what the cache holds."""
        self._scheduler.check_integrity()
