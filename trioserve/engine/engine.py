"""The engine: one thread that takes tasks, runs steps, and emits their results.

A step is schedule, decode, sample, learn (`Engine._step`), and then `EngineLoop.step` emits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs

from trioserve.engine.adapters import AdapterTable
from trioserve.engine.backend import Backend
from trioserve.engine.cache.disk_cache import DiskCache
from trioserve.engine.cache.prefix_cache import DEFAULT_RULES, CheckpointRules, PrefixCache
from trioserve.engine.cache.ram_cache import CachedState
from trioserve.engine.decoder import BatchDecoder
from trioserve.engine.drafts.drafts import Drafts
from trioserve.engine.encoder import Encoded, needs
from trioserve.engine.loop import Call, Cancel, Command, EngineLoop, Pause, Submit
from trioserve.engine.output import Outputs, Sampled, SampledToken, SamplerPool
from trioserve.engine.planner import Planner, StepPlan
from trioserve.engine.queue import waiting_status
from trioserve.engine.scheduler import Scheduler
from trioserve.engine.slot import RequestState, Slot
from trioserve.engine.strategy import BatchStrategy
from trioserve.errors import (
    ContextLengthExceededError,
    DecodeError,
    DecodeInterruptedError,
    EngineError,
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
    TrioServeError,
)
from trioserve.types import (
    AdapterInfo,
    Admitted,
    AnyTask,
    CacheRoot,
    Chunk,
    EngineStatus,
    Failed,
    FinishReason,
    MediaChunk,
    Preempted,
    SlotState,
    Task,
)


class Engine(EngineLoop):
    """Runs tasks on a backend with slots and continuous batching.

    Args:
        backend: the model. The engine owns it, and closes it when its thread ends.
        strategy: how a step is shared between decode and prefill.
        cache_ram: bytes of RAM for sequences that leave the KV cache.
        max_idle: cells of a unified KV cache that idle sequences may hold while requests run; the
            others move to RAM. None: any number.
        checkpoints: how many a model keeps whose sequences cannot be cut.
        disk: where what leaves RAM is kept. The engine owns it.
        context_shift: in a full context, drop the older half and continue, rather than end. A text
            with media ends.
        notify: see `EngineLoop`. A task's first and last token are sent at once.
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
        disk: DiskCache | None = None,
        context_shift: bool = False,
    ) -> None:
        super().__init__(backend, notify)
        #: As `Backend` has them. From any thread but the event loop's and the inference thread.
        self.compile = backend.compile
        self.write_state, self.read_state = backend.write_state, backend.read_state
        self.embedding_pooling, self.make_embedder = backend.embedding_pooling, backend.embedder
        self.load_speaker = backend.speaker
        self._backend = backend
        self._cache = PrefixCache(
            backend, cache_ram, max_idle=max_idle, checkpoints=checkpoints, disk=disk
        )
        self._disk = disk
        self._planner = Planner(
            strategy,
            n_batch=backend.n_batch,
            n_score_rows=backend.n_score_rows,
            is_even=backend.rollback.is_even,
            unified=backend.unified,
            has_adapters=bool(backend.adapters),
            encoder=self.encoder,
        )
        self._scheduler = Scheduler(backend, self._cache, self._planner)
        self.drafts = Drafts(self._scheduler, backend.drafters)
        self._decoder = BatchDecoder(backend, self._interrupts, self.encoder)
        self.adapter_table = AdapterTable(
            backend,
            lambda: (one.task.root.adapters for one in self._scheduler.requests()),
            self._planner.expect_adapters,
            self._decoder.unset_adapters,
        )
        self._outputs = Outputs(self.vocab, self.n_ctx_seq, shifts=context_shift)
        self._samplers = SamplerPool(backend)
        #: That of the last step, if there is nothing to decide about the next one.
        self._plan: StepPlan | None = None
        self._slot_calls: list[Call] = []  # that wait until their slots are idle
        self._learned_at = 0.0  # the end of the last step that decoded

    # -- from any thread

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        return self._backend.adapters

    @property
    def keeps_checkpoints(self) -> bool:
        """True if `Prompt.divergence_points` help: sequences cannot be cut, and some are kept."""
        return self._cache.keeps_checkpoints

    def check(self, task: AnyTask) -> None:
        """Refuse a task that can never run.

        Raises:
            InvalidMediaError: the model cannot take one of its media.
            InvalidRequestError: the prompt or a parameter is wrong; `param` names the field.
            ContextLengthExceededError: the prompt leaves no room for an output.
            NotSupportedError: it is one for embeddings.
            EngineError: its grammar was not compiled, or the engine has failed.
        """
        self.check_works()
        if not isinstance(task, Task):
            raise NotSupportedError("This engine makes text, and no embeddings.")
        prompt, params = task.prompt, task.params
        if not prompt:
            raise InvalidRequestError("The prompt has no tokens.", param="prompt")
        if prompt.media:
            self.check_media(prompt, "prompt")
        if len(prompt) >= self.n_ctx_seq:
            raise ContextLengthExceededError(len(prompt), self.n_ctx_seq)
        prompt.check(self.vocab.n_tokens, "prompt")
        if params.sampling.needs_vocab:
            self._backend.check_sampling(params.sampling)
        if params.grammar is not None and task.constraint is None:
            raise EngineError("The grammar of the task was not compiled.")
        if params.id_slot >= self.n_slots:
            raise InvalidRequestError.at("id_slot", f"must be less than {self.n_slots}.")
        if task.root.adapters:
            self.adapter_table.check(task.root.adapters)

    # -- the texts of idle slots. Use these three methods through `call`

    def save_slot(self, slot_id: int, owner: str) -> SlotState:
        """Read the cached part of a slot's last text; see `PrefixCache.save`.

        Raises:
            PermissionDeniedError: the text is not the owner's.
            UnavailableError: another request is at it.
        """
        slot = self._scheduler.slots[slot_id]
        slot.check_owner(owner)
        return self._cache.save(slot.kept, slot.root if slot.kept else CacheRoot(owner=owner))

    def restore_slot(self, slot_id: int, saved: SlotState) -> None:
        """Load a saved text into a slot, for later prompts that begin with it, in any slot.

        Raises:
            KVCacheFullError: the running requests leave no room for it.
            InvalidRequestError: the state does not fit the context, or is of other tokens.
        """
        slot = self._scheduler.slots[slot_id]
        assert slot.request is None
        if saved.keys:
            self._cache.restore(saved)
        slot.kept, slot.root = list(saved.keys), saved.root

    def erase_slot(self, slot_id: int, owner: str) -> int:
        """Forget a slot's last text; returns how many of its tokens were there.

        Raises PermissionDeniedError if the text is not the owner's.
        """
        slot = self._scheduler.slots[slot_id]
        slot.check_owner(owner)
        n_erased = self._cache.erase(slot.kept, slot.root)
        slot.kept = []
        return n_erased

    # -- on the inference thread

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def end_thinking(self, task_id: int) -> bool:
        """End the reasoning of a task. Use it through `call`.

        Returns whether the task runs and has a budget; outside its reasoning, nothing changes.
        """
        request = self._scheduler.find(task_id)
        if request is None or request.reasoning is None:
            return False
        request.reasoning.end()
        request.close_thinking()
        return True

    def _step(self) -> bool:
        """Schedule, decode, sample, and learn what that took."""
        plan, self._plan = self._plan or self._schedule(), None
        if rows := self._decode(plan):
            self._sample(plan, rows)
        self._learn(plan, has_decoded=bool(rows))
        if self._slot_calls:
            self._make_slot_calls()
        if rows and plan.n_left and not (self.drafts.is_on and not self.drafts.rest()):
            self._plan = plan
            return True
        return self._scheduler.has_work

    def _schedule(self) -> StepPlan:
        """Decide what this step decodes."""
        if self.drafts.is_on:
            self.drafts.propose()
        began = self.clock()
        plan = self._scheduler.schedule()
        # Copies for requests that start say nothing about the next step.
        plan.scheduling_s = self.clock() - began
        self._n_readers = self._scheduler.n_readers()
        if self._scheduler.admitted or self._scheduler.preempted:
            self._emit_admissions()
        return plan

    def _decode(self, plan: StepPlan) -> list[int]:
        """Decode a plan; returns the row to sample from of each slot, or none if that failed."""
        if not plan.n_cells:
            return []
        try:
            rows = self._decoder.decode(plan)
        except DecodeInterruptedError:
            return []  # the cancel that it was for comes before the next step
        except DecodeError as error:
            self._recover(plan, error)
            return []
        self._cache.held.append_each(plan.seqs, plan.keys)
        for piece in plan.others:
            piece.note(self._cache)
        return rows

    def _recover(self, plan: StepPlan, error: DecodeError) -> None:
        """Try again without drafts or a request, or fail those in the plan."""
        if isinstance(error, KVCacheFullError):
            if self._scheduler.drop_drafts():
                return
            if plan.n_slots > 1:
                self._scheduler.overflow(plan.slots)
                return
        for slot in plan.slots:
            self._fail(slot, error)

    def _sample(self, plan: StepPlan, rows: list[int]) -> None:
        """Sample, and add the tokens to the outputs."""
        is_steady = plan.n_left > 0
        slots, requests = plan.streams, plan.requests
        if plan.others:
            slots, requests, rows = self._ready(plan, rows)
        sampled = self._samplers.sample(requests, rows, are_plain=is_steady)
        if is_steady and (chunks := self._outputs.step_steadily(plan, sampled)) is not None:
            self._fresh.append(chunks)
            return
        chunks, others = self._outputs.step(requests, sampled, plan.pace)
        if chunks.task_ids:
            self._fresh.append(chunks)
        for i in others:
            self._next_tokens(slots[i], requests[i], sampled[i], plan.pace)
        if is_steady:
            plan.keep_repeating(requests[i] for i in others)
        elif plan.may_repeat and not self._scheduler.waiting:
            plan.repeat(self._scheduler.n_ctx - self._cache.held.taken)

    def _ready(
        self, plan: StepPlan, rows: list[int]
    ) -> tuple[list[Slot], list[RequestState], list[int]]:
        """Pick the slots that have logits to sample from, each with its request and its row."""
        slots, requests, n_streams = [*plan.streams], [*plan.requests], len(plan.streams)
        ready_rows = rows[:n_streams]
        for piece, row in zip(plan.others, rows[n_streams:], strict=True):
            slot, request = piece.slot, piece.slot.request
            assert request is not None
            if not piece.in_decode:
                self._note_prefill(slot, request, piece.n_cells)
                self._scheduler.note_prefill(slot)
                if request.scores is not None and not self._score(slot, request, row):
                    continue
            if piece.in_decode or (slot.n_pending == 0 and self._begins_output(slot, request)):
                slots.append(slot)
                requests.append(request)
                ready_rows.append(row)
        return slots, requests, ready_rows

    def _score(self, slot: Slot, request: RequestState, row: int) -> bool:
        """Take the scores of a prompt up to a row, and emit them at its end; False: it failed."""
        try:
            scores = self._scheduler.scores.collect(request, slot.n_held, row)
        except TrioServeError as error:
            self._fail(slot, error)
            return False
        if scores is not None:
            self._emit(Chunk(request.task.id, "", (), scores=scores))
        return True

    def _begins_output(self, slot: Slot, request: RequestState) -> bool:
        """Put a slot into decode, with a sampler; ends a request with `max_tokens` 0."""
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

    def _next_tokens(
        self, slot: Slot, request: RequestState, sampled: Sampled, pace: float
    ) -> None:
        """Add the sampled tokens to a request; end the request if it is complete or failed."""
        if isinstance(sampled, TrioServeError):
            self._fail(slot, sampled)
            return
        tokens = [SampledToken(sampled)] if isinstance(sampled, int) else sampled
        n_before = len(request.keys)
        chunk = self._outputs.accept(request, tokens, pace)
        new = request.keys[n_before:]
        request.n_ahead = max(0, len(new) - 1)
        if request.draft:
            self.drafts.settle(slot, new[: len(tokens) - 1])
        if chunk is not None:
            if request.n_drafted:
                counts = request.n_drafted, request.n_accepted
                chunk = attrs.evolve(chunk, drafts=counts)
            self._fresh.append(chunk)
            if len(chunk.tokens) == request.n_output:
                self._urgent = self._is_first = True
        if request.finish_reason is not None:
            self._finish(slot, request)
        elif len(request.keys) >= self.n_ctx_seq:
            self._shift(slot, request)

    def _shift(self, slot: Slot, request: RequestState) -> None:
        """Make room in a full context: the remaining tokens are prefilled at new positions."""
        # Moving the positions in the KV cache would be faster, but other sequences may share the
        # cells, and the result would depend on tokens that are gone.
        assert slot.seq is not None
        n_keep = request.shift(self.n_ctx_seq, int(self.info.add_bos))
        self._cache.held.cut(slot.seq, n_keep if self._backend.can_cut else 0)
        slot.in_decode = False

    def _learn(self, plan: StepPlan, *, has_decoded: bool) -> None:
        """Count what this step decoded, and report its cost to those who decide by it."""
        counters, now = self._counters, self.clock()
        seconds = now - self.heartbeat
        counters.steps += 1
        counters.step_s += seconds
        if not has_decoded:
            return
        seconds -= plan.scheduling_s
        counters.decodes += 1
        counters.busy_slots += plan.n_slots
        if plan.may_repeat:
            plan.scheduling_s = 0.0
            self._planner.quiet.append((plan.n_decode, seconds))
        else:
            if plan.n_prefill:
                counters.prompt_tokens += plan.n_prefill
                counters.prompt_s += seconds
            self._planner.observe(plan, seconds, now - self._learned_at)
        self._learned_at = now
        if self.drafts.is_on:
            self.drafts.observe(plan, seconds)
        if self.watchers:
            self._in_batch = (plan.n_slots, plan.n_cells - plan.n_prefill, plan.n_prefill)

    # -- the other events

    def _emit_admissions(self) -> None:
        """Tell of the requests that have lost their slots, and of those that have got one."""
        for preempted in self._scheduler.preempted:
            self._emit(Preempted(preempted.task.id))
        for slot in self._scheduler.admitted:
            request = slot.request
            if request is None:
                continue
            if request.admitted_at is None:
                request.admitted_at = self.heartbeat
                request.cached = slot.n_held
                self._counters.prompt_queries += request.n_prompt
                self._counters.cached_tokens += request.cached
                if slot.seq is not None and slot.seq.from_disk:
                    self._counters.disk_tokens += request.cached
                elif slot.seq is not None and slot.seq.from_ram:
                    self._counters.ram_tokens += request.cached
                if progress := request.progress(slot.n_held, self._backend.n_batch):
                    self._emit(progress)
            self._emit(Admitted(request.task.id, request.queue_ms))
        self._scheduler.admitted, self._scheduler.preempted = [], []

    def _note_prefill(self, slot: Slot, request: RequestState, n_cells: int) -> None:
        if request.n_output:
            return  # preempted or shifted: this is not the prompt's first time
        request.prefilled += n_cells
        if progress := request.progress(slot.n_held, self._backend.n_batch):
            self._emit(progress)

    def _finish(self, slot: Slot, request: RequestState) -> None:
        self._scheduler.release(slot)
        self._end(request)
        self._emit(request.finished(slot.id))

    def _fail(self, slot: Slot, error: TrioServeError) -> None:
        """End the request of a slot with an error, and forget its KV cache."""
        request = self._scheduler.discard(slot)
        self._end(request)
        self._emit(Failed(request.task.id, error))

    def _end(self, request: RequestState) -> None:
        """Free the resources of a finished request, and count it."""
        request.close()
        counters = self._counters
        if request.admitted_at is not None:
            counters.predicted_tokens += request.n_output
            counters.n_tokens_max = max(counters.n_tokens_max, len(request.keys))
            counters.drafts += request.n_drafts
            counters.draft_tokens += request.n_drafted
            counters.accepted_tokens += request.n_accepted

    # -- commands

    def _take(self, command: Command) -> None:
        self._plan = None
        super()._take(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(Task() as task):
                arrived = RequestState(task)
                if task.params.prompt_logprobs is not None:
                    self._scheduler.scores.begin(arrived, task.params.prompt_logprobs)
                self._fetch(arrived)
                self._scheduler.add(arrived)
            case Cancel(task_id):
                request = self._scheduler.remove(task_id)
                self._retract(task_id)  # it may have failed since the last step
                if request is not None:
                    self._end(request)
                    self._make_slot_calls()
                    if not self._scheduler.has_work:
                        self._planner.ask_for_media(self._scheduler.slots)
            case Pause(task_id, paused):
                self._scheduler.pause(task_id, paused)
            case Call():
                self._slot_calls.append(command)
                self._make_slot_calls()
            case Encoded(chunk, error):
                self._take_encoded(chunk, error)

    def _fetch(self, request: RequestState) -> None:
        """Read the beginning of a request from disk, if that is worth it; it waits for that."""
        if self._disk is None or request.n_reusable < 0:
            return

        def done(states: list[CachedState]) -> None:
            self.inbox.put(Call(partial(self._scheduler.fetched, request, states)))

        counters = self._counters
        token_s = counters.prompt_s / counters.prompt_tokens if counters.prompt_tokens else 0.0
        request.is_fetching = self._cache.fetch(request.keys, request.task.root, token_s, done)

    def _make_slot_calls(self) -> None:
        """Make the calls whose slots are idle now, before another request takes them."""
        waiting, self._slot_calls = self._slot_calls, []
        for call in waiting:
            assert call.slot_id is not None
            if self._scheduler.slots[call.slot_id].request is None:
                self._make(call)
            else:
                self._slot_calls.append(call)

    def _take_encoded(self, chunk: MediaChunk, error: TrioServeError | None) -> None:
        """Resume the requests that waited for a chunk, or end them if it cannot be encoded."""
        for slot in self._scheduler.slots:
            slot.awaits_media = False  # until the next step, which looks again
            if error is not None and needs(slot, chunk):
                request = self._scheduler.release(slot)
                self._end(request)
                self._emit(Failed(request.task.id, error))
        if error is not None and self.encoder is not None:
            self._planner.ask_for_media(self._scheduler.slots)
            self.encoder.settle(chunk)

    # -- the end, and a look at it

    def _rest(self) -> None:
        self._decoder.threads.rest()

    def _tidy(self, *, is_soon: bool) -> bool:
        return self._cache.tidy(is_soon=is_soon)

    def _fail_all(self, error: EngineError) -> None:
        for request in list(self._scheduler.requests()):
            self._scheduler.remove(request.task.id)
            self._end(request)
            self._emit(Failed(request.task.id, error))

    def start_helpers(self) -> None:
        super().start_helpers()
        self._samplers.start()
        self._decoder.threads.start()
        if self._disk is not None:
            self._disk.start()

    def end_helpers(self) -> None:
        super().end_helpers()
        self._samplers.close()
        self._decoder.threads.close()
        if self._disk is not None:
            self._disk.close()

    def _close(self) -> None:
        if self.failure is None:
            self._cache.write_all()
        self.end_helpers()
        for request in self._scheduler.requests():
            request.close()
        self.drafts.close()
        self._backend.close()

    def _load(self) -> tuple[int, int]:
        scheduler = self._scheduler
        return len(scheduler.running()), len(scheduler.waiting) + len(scheduler.stalled)

    def status(self) -> EngineStatus:
        scheduler, counters = self._scheduler, self._counters
        requests, n_ctx, is_on = list(scheduler.requests()), self.n_ctx_seq, self.drafts.is_on
        return EngineStatus(
            slots=tuple(slot.status(n_ctx, speculative=is_on) for slot in scheduler.slots),
            drafts=self.drafts.counts,
            waiting=waiting_status(scheduler.queue()),
            counters=attrs.evolve(
                counters,
                predicted_tokens=counters.predicted_tokens + sum(one.n_output for one in requests),
                n_tokens_max=max(counters.n_tokens_max, *(one.n_held for one in scheduler.slots)),
                drafts=counters.drafts + sum(one.n_drafts for one in requests),
                draft_tokens=counters.draft_tokens + sum(one.n_drafted for one in requests),
                accepted_tokens=counters.accepted_tokens + sum(one.n_accepted for one in requests),
                n_cells=scheduler.n_ctx,
                n_cells_used=self._cache.held.taken,
                n_cells_copied=self._cache.held.copied,
                n_cells_running=self._cache.held.taken_by_running(),
                **self._cache.counters(),
                **self._decoder.threads.counters(),
            ),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots and cache agree with the backend."""
        self._scheduler.check_integrity()
