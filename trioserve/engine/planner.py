"""`Planner`: chooses what a step decodes, from the pending cells of the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from time import monotonic

import attrs

from trioserve.engine.backend import Batch, Embeddings, MediaPiece
from trioserve.engine.background import Background
from trioserve.engine.cache.prefix_cache import PrefixCache
from trioserve.engine.cache.sequences import KVSequence
from trioserve.engine.encoder import MediaEncoder
from trioserve.engine.slot import RequestState, Slot, arrival
from trioserve.engine.strategy import QUIET, BatchStrategy, share_out
from trioserve.types import Adapters, CellKey


class AdapterTurns:
    """Sets of LoRA adapters take turns: llama.cpp computes a whole batch with one set of them.

    A turn lasts for a while, because changing adapters takes time. It ends early when no request
    with these adapters has work. A new set of adapters is added at the end of the order.

    Args:
        seconds: how long a turn lasts while others wait; at least a step.
        now: the clock.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._until = 0.0
        self._order: list[Adapters] = [()]  # the first one has the turn

    @property
    def current(self) -> Adapters:
        return self._order[0]

    def take(self, requested: Sequence[Adapters]) -> Adapters:
        """Choose which of `requested` gets this step. If it is empty, nothing changes."""
        if not requested:
            return self.current
        now, before = self._now(), self.current
        order = [one for one in self._order if one in requested]
        order += [one for one in dict.fromkeys(requested) if one not in order]
        if order[0] == before and now >= self._until:
            order.append(order.pop(0))
        if order[0] != before:
            self._until = now + self._seconds
        self._order = order
        return order[0]


@attrs.frozen
class Work:
    """Decode the next `n_cells` pending cells of a slot."""

    slot: Slot
    n_cells: int
    in_decode: bool

    @property
    def has_draft(self) -> bool:
        return self.slot.request is not None and bool(self.slot.request.draft)

    def fill(self, batch: Batch) -> int:
        """Put them into the batch; returns the row to sample from.

        That is the last one. It has logits if nothing is pending then. Where there is a draft, it
        is the row before the draft, and each row of the draft has logits, too.
        """
        request, seq = self.slot.request, self.slot.seq
        assert request is not None and seq is not None
        start = len(seq.held)
        pos, keys = seq.position(start), request.keys[start : start + self.n_cells]
        row = batch.extend(keys, pos, seq.id)
        if start + len(keys) == len(request.keys):
            batch.want_logits(row)
        if not self.in_decode:
            end = start + len(keys)
            for cell in range(request.next_score, min(end, request.n_prompt - 1)):
                batch.want_logits(row - (end - 1 - cell))
        for i, guess in enumerate(request.draft, start=len(keys)):
            batch.add(guess, pos + i, seq.id, logits=True)
        return row

    def note(self, cache: PrefixCache) -> None:
        request, seq = self.slot.request, self.slot.seq
        assert request is not None and seq is not None
        start = len(seq.held)
        cache.held.append(seq, request.keys[start : start + self.n_cells] + request.draft)
        request.n_ahead = 0


@attrs.frozen
class MediaWork(Work):
    """Decode the next `n_cells` cells of a chunk of media in a prompt."""

    embeddings: Embeddings = attrs.field(repr=False)

    def piece(self) -> MediaPiece:
        request, seq = self.slot.request, self.slot.seq
        assert request is not None and seq is not None
        start, stop = len(seq.held), len(seq.held) + self.n_cells
        logits = stop == len(request.keys)
        return MediaPiece.of(
            request.task.prompt, start, stop, self.embeddings, seq.id, logits=logits
        )


_REQUEST, _SEQ, _KEYS = attrgetter("request"), attrgetter("seq"), attrgetter("keys")
_HELD, _FOLDS, _ID = attrgetter("held"), attrgetter("folds"), attrgetter("id")
_LAST, _N_PLAIN = itemgetter(-1), attrgetter("n_plain")


class StepPlan:
    """The cells that a step decodes: the newest tokens of outputs, drafts, and parts of prompts.

    Nearly all of these are outputs without a draft, up to hundreds, so their data is in columns.
    A step with media has nothing else.

    With hundreds of streams, nearly all steps differ from the one before in nothing but their
    tokens: no command has come, no request has begun or ended, and there is no prompt and no draft.
    Then there is nothing to decide, and the plan is used again: see `repeat`.

    Args:
        streams: slots in decode that have no draft: each adds its newest token.
        others: drafts and prompts.
        by_sequence: order the rows of a batch by their sequences. In a split KV cache, llama.cpp
            computes rows together if their sequences have consecutive numbers.
    """

    def __init__(
        self,
        streams: list[Slot],
        others: Sequence[Work],
        *,
        by_sequence: bool = False,
        is_media: bool = False,
    ) -> None:
        if by_sequence and others:
            pieces = [*others, *(Work(slot, 1, in_decode=True) for slot in streams)]
            streams, others = [], sorted(pieces, key=lambda piece: _sequence(piece.slot))
        elif by_sequence:
            streams = sorted(streams, key=_sequence)
        self.streams, self.others, self.is_media = streams, others, is_media
        #: There is nothing but streams, so the next step is the same if nothing happens.
        self.may_repeat = False
        #: The number of next steps that may be the same; see `repeat`.
        self.n_left = 0
        #: All of it is the background's, so that it ends when another request arrives.
        self.yields = False
        #: The part of it that is not the background's, if there is both at work.
        self.ahead: StepPlan | None = None
        self.adapters: Adapters = ()  # that all of its requests have
        #: Seconds between two tokens of a stream for its reader; 0: as they come.
        self.pace = 0.0
        self.scheduling_s = 0.0  # that it took to make it
        # `map` instead of a loop: there may be hundreds.
        self.requests: list[RequestState] = list(map(_REQUEST, streams))
        self.seqs: list[KVSequence] = list(map(_SEQ, streams))
        self.keys: list[CellKey] = list(map(_LAST, map(_KEYS, self.requests)))  # the newest of each
        self.n_slots = len(streams) + len(others)
        self.n_decode = self.n_cells = len(streams)  # outputs in decode; cells that it fills
        self.n_prefill = 0  # cells of prompts
        for work in others:
            self.n_cells += work.n_cells
            if work.in_decode:
                self.n_decode += 1
            else:
                self.n_prefill += work.n_cells

    @property
    def slots(self) -> list[Slot]:
        """The slots, in the order of the rows of `fill`."""
        return [*self.streams, *(piece.slot for piece in self.others)]

    def without_background(self) -> StepPlan:
        return StepPlan(
            [slot for slot in self.streams if not _is_background(slot)],
            [piece for piece in self.others if not _is_background(piece.slot)],
            is_media=self.is_media,
        )

    def repeat(self, n_room: int) -> None:
        """Have the next steps decode the tokens that were sampled, each one position further.

        They do so until the engine takes a command, or a request needs more than that: as many
        steps as each of them is plain, and as there is room for, with `n_room` cells.
        """
        n_plain = min(map(_N_PLAIN, self.requests))
        self.n_left = min(n_plain, n_room // self.n_cells)
        if self.n_left:
            self.rows = list(range(self.n_cells))
            self.texts = list(map(_KEYS, self.requests))
            self.task_ids = [request.task.id for request in self.requests]
            self.keys = list(map(_LAST, self.texts))

    def keep_repeating(self, looked_at: Iterable[RequestState]) -> None:
        """Decode the new tokens next, if the requests that were looked at are still plain."""
        self.keys = list(map(_LAST, self.texts))
        self.n_left = min(self.n_left - 1, *map(_N_PLAIN, looked_at))

    def fill(self, batch: Batch) -> list[int]:
        """Put all of it into the batch; returns the row to sample from of each slot."""
        batch.clear()
        positions = list(map(len, map(_HELD, self.seqs)))
        if any(map(_FOLDS, self.seqs)):
            positions = [seq.position(len(seq.held)) for seq in self.seqs]
        rows = [*batch.add_each(self.keys, positions, list(map(_ID, self.seqs)))]
        for piece in self.others:
            rows.append(piece.fill(batch))
        return rows

    def media(self) -> list[MediaPiece]:
        """Describe the media to decode, in the order of the slots."""
        return [work.piece() for work in self.others if isinstance(work, MediaWork)]


def _is_background(slot: Slot) -> bool:
    assert slot.request is not None
    return slot.request.is_background


def _sequence(slot: Slot) -> int:
    assert slot.seq is not None
    return slot.seq.id


#: Seconds that one set of adapters keeps its turn while others wait. Changing adapters takes a few
#: milliseconds, because llama.cpp plans its buffers again.
TURN_S = 0.02


class Planner:
    """Chooses what each step decodes.

    A batch has tokens or embeddings of media, never both. So a step with media holds up the
    streams, and a step with only their tokens follows it. The strategy counts both as one step::

        one step | media of prompts | tokens of streams |
        another  | tokens of prompts and of streams     |

    Prompts that have media next and prompts that have tokens next take turns.

    Args:
        strategy: how a step is shared between decode and prefill.
        n_batch: the most cells of one step.
        unified: whether all sequences share the cells of the KV cache.
        n_score_rows: how many cells of a step may have logits for the scores of prompts.
        is_even: drafts are of one length, and have one prompt beside them; see `Rollback`.
        has_adapters: requests may have LoRA adapters, so that not all fit in one batch.
        encoder: makes embeddings of media; None: there is only text.
    """

    def __init__(
        self,
        strategy: BatchStrategy,
        *,
        n_batch: int,
        unified: bool,
        n_score_rows: int = 1,
        is_even: bool = False,
        has_adapters: bool = False,
        encoder: MediaEncoder | None = None,
    ) -> None:
        self._strategy = strategy
        strategy.begin(unified=unified)
        self.background = Background()
        self._n_batch, self._n_score_rows = n_batch, n_score_rows
        self._by_sequence, self._is_even = not unified, is_even
        self._encoder = encoder
        self.turns: AdapterTurns | None = None
        if has_adapters:
            self.expect_adapters()
        self._was_media = False  # the last step that had anything of a prompt
        self._owes_streams = False  # the last step had media, and streams waited for it
        self._held_up: tuple[int, float] = 0, 0.0  # its cells, and its seconds
        self._n_other_streams = 0  # that decode in another turn
        self._has_asked = False  # the encoder was asked for media
        #: Steps without prompts that the strategy was not told of: outputs in decode, and seconds.
        self.quiet: deque[tuple[int, float]] = deque(maxlen=QUIET)

    def expect_adapters(self) -> None:
        """From now on, requests may have LoRA adapters."""
        if self.turns is None:
            self.turns = AdapterTurns(TURN_S)

    def plan(self, slots: Sequence[Slot]) -> StepPlan:
        """Give every decoding slot its token and draft, and prompts their shares.

        The background has what `Background` leaves it.
        """
        if self._encoder is not None:
            self.ask_for_media(slots)
        active: Sequence[Slot] = [
            slot
            for slot in slots
            if slot.request is not None and not slot.request.paused and not slot.awaits_media
        ]
        background, n_background = self.background, 0
        if background.is_beside or background.is_alone or any(map(_is_background, active)):
            active, n_background = background.share(active)
        plan = self._plan(active, n_background)
        if self.turns is not None:
            plan.adapters = self.turns.current
        plan.yields = background.is_alone
        if background.is_beside:
            plan.ahead = plan.without_background()
            plan.pace = background.pace
        plan.pace = max(plan.pace, self._strategy.pace)
        is_owed = self._held_up[0] or plan.pace
        if is_owed or self.turns or self._has_asked or background.is_beside:
            plan.may_repeat = False
        return plan

    def _plan(self, slots: Sequence[Slot], n_background: int) -> StepPlan:
        """Fill a step; `n_background` tokens are for prompts of the background, if it has any."""
        streams, drafts, prompts = [], [], []
        if self.turns is not None:
            slots = self._with_current_adapters(slots, self.turns)
        for slot in slots:
            request = slot.request
            assert request is not None
            if not slot.in_decode:
                prompts.append(slot)
            elif request.draft or request.n_ahead:
                drafts.append(Work(slot, slot.n_pending, True))
            else:
                streams.append(slot)
        if self._is_even:  # llama.cpp begins with the rows of the others
            drafts.sort(key=lambda work: work.has_draft)
        has_streams = bool(streams or drafts)
        behind = [slot for slot in prompts if n_background and _is_background(slot)]
        if prompts := behind or prompts:
            prompts = self._of_one_kind(sorted(prompts, key=arrival), has_streams)
            if self._is_even and drafts and drafts[-1].has_draft:
                prompts = prompts[:1]
        self._owes_streams = False
        if not prompts:
            plan = StepPlan(streams, drafts, by_sequence=self._by_sequence)
            plan.may_repeat = not drafts
            return plan
        prompts, pending = self._pending(prompts)
        # Streams that decode in another turn are held up by this step, too.
        n_decode = self._n_other_streams + len(streams) + len(drafts)
        is_media, budget = prompts[0].is_at_media, self._n_batch
        if not is_media:
            budget -= len(streams) + sum(work.n_cells for work in drafts)
        if behind:
            shares: Sequence[int] = share_out(pending, min(n_background, budget))
        else:
            self._report_quiet()
            n_watched = 0 if self.background.is_alone else n_decode
            shares = self._strategy.share(pending, n_watched, budget)
        if not any(shares) and not has_streams:  # the decoding slots are of another turn
            shares = self._strategy.share(pending, 0, budget)
        shared = [(slot, n) for slot, n in zip(prompts, shares, strict=True) if n]
        if shared:
            self._was_media = is_media
        if shared and is_media:
            self._owes_streams = has_streams
            return StepPlan([], self._media_of(shared), is_media=True)
        parts = [Work(slot, slot.up_to_checkpoint(n_cells), False) for slot, n_cells in shared]
        return StepPlan(streams, drafts + parts, by_sequence=self._by_sequence)

    def _pending(self, prompts: list[Slot]) -> tuple[list[Slot], list[int]]:
        """Find what may be in a step of each prompt; those without a row for their scores wait."""
        n_rows, pending = self._n_score_rows, []
        for slot in prompts:
            n_cells, n_rows = slot.up_to_scores(n_rows)
            pending.append((slot, n_cells))
        able = [(slot, n_cells) for slot, n_cells in pending if n_cells]
        return [slot for slot, _ in able], [n_cells for _, n_cells in able]

    def _with_current_adapters(self, slots: Sequence[Slot], turns: AdapterTurns) -> list[Slot]:
        """Pick the slots that may be in one batch, and count the streams among the others."""
        active = [(slot, slot.request.task.root.adapters) for slot in slots if slot.request]
        turn = turns.take([adapters for _, adapters in active])
        self._n_other_streams = sum(slot.in_decode for slot, its in active if its != turn)
        return [slot for slot, its in active if its == turn]

    def observe(self, plan: StepPlan, seconds: float, interval: float) -> None:
        """Report the cost of a step to the strategy, and the time since the end of the last one.

        A step with media that held up streams is counted together with their next step.
        """
        ahead = plan if plan.ahead is None else plan.ahead
        if plan.ahead is not None:
            n_others = ahead.n_cells
            seconds = self.background.observe(plan.n_cells, n_others, seconds, interval)
        if not ahead.n_cells:
            return
        n_cells, before = self._held_up
        n_cells, seconds = n_cells + ahead.n_prefill, before + seconds
        if plan.is_media and self._owes_streams:
            self._held_up = n_cells, seconds
        elif n_cells or self._strategy.pace:
            self._held_up = 0, 0.0
            self._report_quiet()
            self._strategy.observe(n_cells, ahead.n_decode, seconds)
        else:
            self.quiet.append((ahead.n_decode, seconds))

    def _report_quiet(self) -> None:
        """Report the last steps without prompts to the strategy, which decides again now."""
        while self.quiet:
            self._strategy.observe(0, *self.quiet.popleft())

    # -- media

    def ask_for_media(self, slots: Sequence[Slot]) -> None:
        """Ask the encoder for the media of prompts, and mark the slots that wait for it."""
        prompts = {
            request.task.id: slot
            for slot in slots
            if (request := slot.request) is not None
            and not slot.in_decode
            and request.task.prompt.media
        }
        if self._encoder is None or not (prompts or self._has_asked):
            return
        self._has_asked = bool(prompts)
        self._encoder.serve(prompts)

    def _of_one_kind(self, prompts: list[Slot], has_streams: bool) -> list[Slot]:
        """Pick the prompts that have tokens next, or those that have media next."""
        media = [slot for slot in prompts if slot.is_at_media]
        if not media:
            return prompts
        if self._owes_streams and has_streams:
            return []
        texts = [slot for slot in prompts if not slot.is_at_media]
        return texts if texts and self._was_media else media

    def _media_of(self, shared: Sequence[tuple[Slot, int]]) -> list[MediaWork]:
        """Take parts of chunks for a step, or one that must be decoded whole."""
        assert self._encoder is not None
        works = []
        for slot, n_cells in shared:
            chunk = slot.media_now()
            assert chunk is not None
            embeddings = self._encoder.get(chunk)
            assert embeddings is not None, "nothing was encoded"
            if chunk.is_causal:
                works.append(MediaWork(slot, n_cells, False, embeddings))
            elif not works:
                return [MediaWork(slot, chunk.n_cells, False, embeddings)]
        return works
