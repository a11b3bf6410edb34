"""`Scheduler`: gives requests slots, preempts them, and fills steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic

from trioserve.engine.backend import Backend
from trioserve.engine.cache.prefix_cache import PrefixCache, divergence_point
from trioserve.engine.cache.ram_cache import CachedState
from trioserve.engine.cache.sequences import KVSequence
from trioserve.engine.planner import Planner, StepPlan
from trioserve.engine.queue import WaitingQueue
from trioserve.engine.scores import ScoreKeeper
from trioserve.engine.slot import RequestState, Slot, lowest_priority
from trioserve.types import TokenId

#: A request waits for cells for as many steps as it has tokens, times the first, before others are
#: preempted for it. Then it keeps them until it has grown by the second. So the work that has to be
#: done again is bounded by the steps.
PATIENCE, GROWTH = 1 / 2, 1 / 8


def _is_preemptible(slot: Slot, request: RequestState) -> bool:
    """True if the request of a slot may be preempted for another client's."""
    one = slot.request
    assert one is not None
    return one.task.priority <= request.task.priority and not one.is_safe


class Scheduler:
    """Assigns requests to slots and fills steps.

    Args:
        backend: has the slots, and the limits of a step.
        cache: what its KV sequences hold.
        planner: fills the steps.
    """

    def __init__(self, backend: Backend, cache: PrefixCache, planner: Planner) -> None:
        assert backend.n_slots <= min(backend.n_outputs, backend.n_seqs)
        assert backend.n_outputs <= backend.n_batch
        self.slots = [Slot(i) for i in range(backend.n_slots)]
        self.waiting: WaitingQueue[RequestState] = WaitingQueue()
        self.stalled: dict[int, RequestState] = {}  # paused and without a slot, by task id
        self.n_ctx, self.n_ctx_seq = backend.n_ctx, backend.n_ctx_seq
        self._n_outputs, self._cuttable = backend.n_outputs, backend.cuttable
        #: The rules for taking back wrong guesses.
        self.rollback = backend.rollback
        self.cache = cache
        #: Of prompts whose requests want them.
        self.scores = ScoreKeeper(backend)
        self.planner = planner
        #: Slots that requests got, and requests that lost theirs, until the engine has reported
        #: them.
        self.admitted: list[Slot] = []
        self.preempted: list[RequestState] = []
        self._step = 0
        #: All slots wait for the encoder, and the requests admitted since have no room. The next
        #: step comes when a slot has its media, or when a request arrives, leaves or is paused.
        self._is_blocked = False
        #: The request that `has_work` has found to start, if nothing has changed since.
        self._found: tuple[RequestState, Slot] | None = None
        #: The backend has found no cells where the ledger counts some. Until a request leaves
        #: its slot, none is admitted beside those that run: it would be preempted again.
        self._is_full = False

    # -- what comes in and goes out

    def add(self, request: RequestState) -> None:
        self._look_again()
        self.waiting.push(request)

    def fetched(self, request: RequestState, states: Sequence[CachedState]) -> None:
        """Let a request start, with what was read of its beginning."""
        self._look_again()
        request.is_fetching = False
        self.cache.take_in(states)

    def _look_again(self) -> None:
        self._is_blocked, self._found = False, None

    def _slot_of(self, task_id: int) -> Slot | None:
        for slot in self.slots:
            if slot.request is not None and slot.request.task.id == task_id:
                return slot
        return None

    def find(self, task_id: int) -> RequestState | None:
        """Find a request, waiting or in a slot."""
        slot = self._slot_of(task_id)
        if slot is not None:
            return slot.request
        return self.waiting.get(task_id) or self.stalled.get(task_id)

    def requests(self) -> Iterator[RequestState]:
        """Go through all: those in slots, those that wait, and those whose readers stall."""
        yield from self.running()
        yield from self.queue()

    def running(self) -> list[RequestState]:
        return [slot.request for slot in self.slots if slot.request is not None]

    def n_readers(self) -> int:
        """Count the requests in slots whose readers wait: none of the background beside others."""
        n_running = n_others = 0
        for slot in self.slots:
            if slot.request is not None:
                n_running += 1
                n_others += not slot.request.is_background
        return n_others or n_running

    def queue(self) -> Iterator[RequestState]:
        """Go through the requests without a slot, in the order of their turns."""
        yield from self.waiting
        yield from self.stalled.values()

    def remove(self, task_id: int) -> RequestState | None:
        """Remove a request, waiting or in a slot. Its slot becomes idle."""
        self._look_again()
        slot = self._slot_of(task_id)
        if slot is not None:
            return self.release(slot)
        return self.waiting.remove(task_id) or self.stalled.pop(task_id, None)

    def pause(self, task_id: int, paused: bool) -> None:
        """Pause or resume a request.

        A paused request keeps its slot until another one wants it, and then waits for its turn
        again.
        """
        request = self.find(task_id)
        if request is None:
            return
        self._look_again()
        request.paused = paused
        if (slot := self._slot_of(task_id)) is not None:
            slot.awaits_media = False  # until the next step, which looks again
        if paused and self.waiting.remove(task_id) is not None:
            self.stalled[task_id] = request
        elif not paused and self.stalled.pop(task_id, None) is not None:
            self.waiting.push(request)

    def release(self, slot: Slot) -> RequestState:
        """End the request of a slot. Its sequence is kept for later prompts."""
        self._is_full = False
        request, seq = self._leave(slot)
        slot.kept, slot.root = request.keys[: len(seq.held)], seq.root
        return request

    def _leave(self, slot: Slot) -> tuple[RequestState, KVSequence]:
        request, seq = slot.give_up(self._step)
        self.cache.release(seq)
        return request, seq

    def discard(self, slot: Slot) -> RequestState:
        """End a slot's request whose decode failed, and drop its sequence: its state is unknown."""
        self._is_full = False
        request, seq = self._leave(slot)
        self.cache.held.cut(seq, 0)
        return request

    def overflow(self, slots: list[Slot]) -> None:
        """Preempt one of several requests for whose cells the backend has no room."""
        self.preempt(lowest_priority(slots))
        self._is_full = True

    def preempt(self, slot: Slot) -> None:
        """Send a slot's request back to the queue, and its sequence to RAM if possible."""
        request, seq = self._leave(slot)
        self.cache.swap_out(seq)
        self.cache.held.cut(seq, 0)
        request.is_preempted = True
        self.waiting.push(request)
        self.preempted.append(request)

    def yield_slot(self, slot: Slot) -> None:
        """Take a slot from a request, paused or of the background, that waits for another turn.

        Its sequence is kept as after its end.
        """
        request, _ = self._leave(slot)
        request.is_preempted = False
        if request.paused:
            self.stalled[request.task.id] = request
        else:
            self.waiting.push(request)
        self.preempted.append(request)

    # -- drafts

    def rows_for_drafts(self) -> int:
        """Count the rows of the batch that drafts may still take, besides one for each slot.

        0 where they cannot be taken back. In a split cache, llama.cpp computes several sequences
        together only if their numbers are consecutive.
        """
        rollback, running = self.rollback, self.running()
        if not rollback.n_max or (rollback.is_even and not self.cache.unified and len(running) > 1):
            return 0
        n_more = sum(one.n_ahead if rollback.is_even else one.n_more for one in running)
        n_rows = self._n_outputs - len(self.slots) - n_more
        if rollback.is_even:
            n_streams = sum(slot.decodes for slot in self.slots)
            n_each = rollback.n_together // (1 + n_streams) - 1
            n_rows = min(n_rows, n_streams * n_each)
        return max(0, n_rows)

    def propose(self, drafts: Sequence[tuple[Slot, Sequence[TokenId]]]) -> int:
        """Give slots in decode drafts: guesses of their next tokens, checked in the next step.

        They are cut to the room that there is, the last ones first. Returns how many rows more
        the step has.
        """
        n_rows = n_left = self.rows_for_drafts()
        for slot, tokens in drafts:
            assert slot.request is not None
            n_left += len(slot.request.draft)
            n_tokens = min(n_left, self.rollback.n_max, slot.room_for_draft(self.n_ctx_seq))
            slot.request.draft = list(tokens[:n_tokens])
            n_left -= len(slot.request.draft)
        return n_rows - n_left

    def even_out(self) -> None:
        """Make all drafts as long as the longest, or as there is room for, with any tokens.

        Slots without a draft get one of these, too: rows of another number take a step's time.
        """
        streams = [(slot, one) for slot in self.slots if (one := slot.request) and slot.decodes]
        drafts = [request.draft for _, request in streams]
        self.drop_drafts()
        n_each = self.rows_for_drafts() // max(1, len(streams))
        length = min(n_each, max(map(len, drafts), default=0))
        for (slot, request), draft in zip(streams, drafts, strict=True):
            if slot.room_for_draft(self.n_ctx_seq) >= length and not request.n_ahead:
                request.n_padded = max(0, length - len(draft))
                request.draft = draft[:length] + request.keys[-1:] * request.n_padded

    def roll_back(self, slot: Slot, n_cells: int) -> None:
        """Take the last cells out of a sequence: the end of a draft that was not accepted.

        What is gone with them is decoded again.
        """
        assert slot.request is not None and slot.seq is not None
        slot.request.draft, slot.request.n_padded = [], 0
        self.cache.held.take_back(slot.seq, n_cells)
        slot.in_decode = bool(slot.seq.held)
        slot.request.n_ahead = max(0, slot.n_pending - 1)

    def drop_drafts(self) -> bool:
        requests = [request for request in self.running() if request.draft]
        for request in requests:
            request.draft = []
        return bool(requests)

    @property
    def has_work(self) -> bool:
        """True if the next step has anything to do."""
        for slot in self.slots:
            request = slot.request
            if request is not None and not request.paused and not slot.awaits_media:
                return True
        if self._is_blocked or not self.waiting:
            return False
        self._found = next(self._admissible(), None)
        return self._found is not None

    # -- one step

    def schedule(self) -> StepPlan:
        self._step += 1
        while self.waiting and (found := self._found or next(self._admissible(), None)):
            (request, slot), self._found = found, None
            if slot.request is not None:
                self.yield_slot(slot)
            self._preempt_for(request)
            self.waiting.admit(request)
            n_reusable, reuse = request.n_reusable, request.task.params.cache_prompt
            keys, root = request.keys[: n_reusable + 1], request.task.root
            slot.take(request, self.cache.start(keys, root, reuse=n_reusable >= 0))
            if reuse and not request.truncated:
                assert slot.seq is not None
                request.checkpoints = self.cache.checkpoint_positions(request.task.prompt, slot.seq)
                self.note_prefill(slot)
            self.admitted.append(slot)
        self._make_room()
        plan = self.planner.plan(self.slots)
        self._is_blocked = not plan.n_cells and bool(self.preempted)
        if self.rollback.needs_state:
            for slot in plan.slots:
                if slot.request is not None and slot.request.draft and slot.seq is not None:
                    self.cache.held.expect_to_take_back(slot.seq)
        return plan

    def note_prefill(self, slot: Slot) -> None:
        """Keep a checkpoint, if a slot in prefill has come to a position for one."""
        assert slot.request is not None and slot.seq is not None
        if slot.n_held in slot.request.checkpoints:
            self.cache.keep_checkpoint(slot.seq)

    def _admissible(self) -> Iterator[tuple[RequestState, Slot]]:
        """Yield the requests that can start now, each with its slot, in the order of their turns.

        The slot is idle, or its request loses it: it is paused, or of the background, and the other
        one is not. A request that waits for cells is passed by those of other clients that fit,
        while these have fewer cells than its client would have. One of lower priority waits.
        """
        free = [slot for slot in self.slots if slot.request is None or slot.request.paused]
        able = free or self._background_slots()
        if not able or (self._is_full and free and len(free) < len(self.slots)):
            return
        # The clients that wait for cells, the fewest that one would have, and their priority.
        short, fewest, level, overdue = set[str](), self.n_ctx + 1, 0, False
        for request in self.waiting:
            id_slot, client = request.task.params.id_slot, request.task.client
            priority = request.task.priority
            slots = able if id_slot < 0 else [slot for slot in able if slot.id == id_slot]
            if client in short or (short and priority < level):
                continue
            if not free and request.is_background:
                continue
            if request.scores is not None:
                self.scores.find(request)
            if not slots or request.is_fetching or self._should_follow(request):
                continue  # it waits for something that those behind it need not wait for
            n_cells = self._n_cells_with(request)
            fits = (not short or n_cells < fewest) and self._fits(request)
            if not fits and not overdue and self._is_overdue(request):
                competing = self._competing(request)
                staying = [slot for slot in competing if not _is_preemptible(slot, request)]
                overdue, fits = True, self._fits(request, staying)
            if not fits:
                level = level if short else priority
                short.add(client)
                fewest = min(fewest, n_cells)
                request.short_since = request.short_since or self._step
                continue
            if free:
                yield (
                    request,
                    min(slots, key=lambda slot: (slot.request is not None, slot.last_used)),
                )
            else:
                yield request, lowest_priority(slots)

    def _background_slots(self) -> list[Slot]:
        """Find the slots that the background loses, if a request waits that is not of it."""
        if all(request.is_background for request in self.waiting):
            return []
        now = monotonic()  # one that has waited and run for long keeps its slot
        return [
            slot
            for slot in self.slots
            if slot.request is not None
            and slot.request.is_background
            and slot.request.risen_priority(now) < 0
        ]

    def _should_follow(self, request: RequestState) -> bool:
        """True if a slot is about to prefill a prefix that a request shares, and starts from."""
        return request.task.params.cache_prompt and any(
            (leader := slot.request) is not None
            and not slot.in_decode
            and not leader.paused
            # The background may take long.
            and (request.is_background or not leader.is_background)
            and leader.task.root == request.task.root
            and leader.task.params.cache_prompt
            and max(n_known := self._n_known(request, slot, leader), self.cache.min_shared)
            < request.shared_with(leader)
            and self.cache.can_share(leader.n_prompt + 1)
            and n_known < self._divergence(request, leader)
            for slot in self.slots
        )

    def _n_known(self, follower: RequestState, slot: Slot, leader: RequestState) -> int:
        """Count the cells of the leader in a slot that a follower may start from by now."""
        if follower.next_score == follower.n_prompt - 1:
            return slot.n_held
        # One that wants scores has those of its leader when the leader has all of them.
        if follower.scores is None or leader.scores is None:
            return leader.n_prompt
        is_same = follower.scores.n_top == leader.scores.n_top
        return follower.next_score + 1 if is_same else leader.n_prompt

    def _divergence(self, follower: RequestState, leader: RequestState) -> int:
        """Find where a follower diverges from its leader, which stops there if it must."""
        shared = follower.shared_with(leader)
        if self.cache.can_cut or leader.n_prompt < self._cuttable:
            return shared
        return divergence_point(leader.checkpoints, shared, self.cache.rules)

    def _competing(self, request: RequestState) -> list[Slot]:
        """Find the slots whose cells a request cannot have: not paused, and not only background."""
        return [
            slot
            for slot in self.slots
            if (one := slot.request) is not None
            and not one.paused
            and (request.is_background or not one.is_background)
        ]

    def _n_cells_with(self, request: RequestState) -> int:
        client, running = request.task.client, (slot.request for slot in self._competing(request))
        ones = [one for one in running if one is not None and one.task.client == client]
        return sum(one.n_cells for one in [request, *ones])

    def _is_overdue(self, request: RequestState) -> bool:
        """True if others make room: it has waited long for cells, and its client has none."""
        waited = self._step - request.short_since
        if not request.short_since or waited < PATIENCE * len(request.keys):
            return False
        return self._n_cells_with(request) == request.n_cells

    def _preempt_for(self, request: RequestState) -> None:
        """Preempt others until an overdue request fits, and give it time."""
        if request.short_since and not self._fits(request):
            n_more = int(GROWTH * len(request.keys)) + 1
            request.safe_until = request.n_output + n_more
            while not self._fits(request):
                competing = self._competing(request)
                self.preempt(lowest_priority([s for s in competing if _is_preemptible(s, request)]))
        request.short_since = 0

    def _fits(self, request: RequestState, active: list[Slot] | None = None) -> bool:
        """True if a request's tokens, and one more, fit beside the active requests."""
        active = self._competing(request) if active is None else active
        seqs = {slot.seq.id for slot in active if slot.seq is not None}
        pending = sum(slot.n_pending for slot in active)
        shared = 0
        if request.n_reusable >= 0:
            keys = request.keys[: request.n_reusable]
            shared, holders = self.cache.find(keys, request.task.root)
            shared = shared if any(seq.id in seqs for seq in holders) else 0
        taken = self.cache.held.taken_by(seqs, request.n_cells, shared)
        return taken + pending <= self.n_ctx

    def _make_room(self) -> None:
        """Free cells until every request has room for what is pending."""
        # First kept sequences, then drafts, then paused requests, and then the least important.
        while self.cache.held.taken + self._n_pending() > self.n_ctx:
            if self.cache.evict_one() or self.drop_drafts():
                continue
            slot = lowest_priority([slot for slot in self.slots if slot.request is not None])
            if slot.request is not None and slot.request.paused:
                self.yield_slot(slot)
            else:
                self.preempt(slot)

    def _n_pending(self) -> int:
        """Count the cells of all requests that are still to be decoded."""
        n_pending = 0
        for slot in self.slots:
            if (request := slot.request) is not None:
                is_stream = slot.in_decode and not request.draft and not request.n_ahead
                n_pending += 1 if is_stream else slot.n_pending
        return n_pending

    # -- the truth about itself

    def check_integrity(self) -> None:
        """Raise AssertionError unless all that must always hold does hold."""
        ids = [request.task.id for request in self.requests()]
        assert len(ids) == len(set(ids)), "a task is in two places"
        assert not any(request.paused for request in self.waiting), (
            "a paused request waits for its turn"
        )
        assert all(request.paused for request in self.stalled.values()), (
            "a request that could run is stalled"
        )
        assert self.cache.held.taken <= self.n_ctx, "more cells than there are"
        in_use = [slot.seq.id for slot in self.slots if slot.seq is not None]
        running = [seq.id for seq in self.cache.held.all if seq.running]
        assert sorted(in_use) == running, "a sequence has two requests, or none"
        for slot in self.slots:
            assert (slot.request is None) == (slot.seq is None)
            if slot.request is None or slot.seq is None:
                continue
            assert slot.n_held <= self.n_ctx_seq
            assert slot.seq.root == slot.request.task.root, (
                "the cache is another key's or adapter's"
            )
            assert slot.request.keys[: slot.n_held] == slot.seq.held, "the cache is another text's"
            assert slot.n_pending >= 1, "nothing left to decode"
            assert slot.in_decode or not slot.request.draft
            assert slot.n_pending == 1 + slot.request.n_more or not slot.in_decode
        self.cache.check_integrity()
