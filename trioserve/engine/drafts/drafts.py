"""`Drafts`: asks the drafters before each step, and checks their guesses afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import attrs

from trioserve.engine.backend import Drafter, DraftRequest
from trioserve.engine.drafts.lengths import Acceptance, share_rows
from trioserve.engine.planner import StepPlan
from trioserve.engine.scheduler import Scheduler
from trioserve.engine.slot import RequestState, Slot
from trioserve.engine.step_costs import StepCosts
from trioserve.types import DraftCounts, TokenId
from trioserve.types.task import shared_length


class Balance:
    """Counts what drafts have gained and lost, in steps without drafts.

    Only trying shows whether drafts pay, and texts change, so there are losses. While they exceed
    the gains, nothing is drafted; every step forgives a little.
    """

    #: The steps that may be lost before anything is gained.
    START = 2.0
    #: The loss that each step forgives.
    ALLOWANCE = 0.005
    #: The largest credit: gains of long ago do not pay for later losses.
    MOST = 20.0

    def __init__(self) -> None:
        self._steps = self.START

    @property
    def is_good(self) -> bool:
        return self._steps > 0

    def add(self, n_accepted: int, n_streams: int, cost: float) -> None:
        """Count a step that took `cost` times as long as one without drafts.

        Drafts have gained its `n_streams` streams `n_accepted` tokens in all.
        """
        self._steps = min(self.MOST, self._steps + n_accepted / n_streams - (cost - 1))

    def forgive(self) -> None:
        if self._steps < self.START:
            self._steps += self.ALLOWANCE


#: The most tokens of a guess by a drafter that costs nothing. Its right tokens serve many steps.
MAX_GUESS = 64
#: A drafter whose drafts do not pay gets another try after 1 step, then 2, 4, up to `MAX_PAUSE`.
#: With several streams, which all wait for it, the pauses grow by as many times. There is no try
#: where good guesses would not pay either: those that are right with the probability `GOOD`.
#: A try asks it for `PROBE` tokens, because two rows may cost nearly as much as six.
MAX_PAUSE, PROBE, GOOD = 256, 5, 0.9
#: Steps in a row at most in which no drafter is asked, and so nothing need be decided.
MAX_REST = 16
#: A step with fewer prompt tokens gives no measurement of what rows cost.
MIN_PROMPT = 32


@attrs.define
class _Guesses:
    """A drafter's guess for a slot, and how good its guesses have been."""

    #: Tokens that come next, if it is right.
    tokens: list[TokenId] = attrs.field(factory=list)
    acceptance: Acceptance = attrs.field(factory=Acceptance)
    #: Steps until it is asked again although its drafts do not pay, and then until the next time.
    wait: int = 0
    pause: int = 1
    last_pause: int = 1  # before the last probe
    #: The experience with this drafter in all slots, unless it is good for one text or another.
    general: _Guesses | None = None

    def check(self, new: list[TokenId]) -> None:
        """Compare the guess with the tokens that came."""
        n_right = shared_length(self.tokens, new)
        is_wrong = n_right < min(len(self.tokens), len(new))
        self.acceptance.observe(n_right, wrong=is_wrong)
        if self.general is not None:
            self.general.acceptance.observe(n_right, wrong=is_wrong)
        self.tokens = [] if is_wrong else self.tokens[n_right:]

    def probe(self, n_streams: int) -> bool:
        """Whether to ask for some tokens although that does not seem to pay: ever less often."""
        if self.wait:
            self.wait -= 1
            return False
        self.wait, self.last_pause = self.pause, self.pause
        self.set_pause(min(MAX_PAUSE * n_streams, 2 * n_streams * self.pause))
        return True

    def set_pause(self, pause: int) -> None:
        """Set the pause after the next probe, for new texts too."""
        self.pause = pause
        if self.general is not None:
            self.general.pause = pause


@attrs.define
class _Stream:
    """A slot in decode, and what is guessed of its text."""

    slot: Slot
    request: RequestState
    n_keys: int  # that the guesses were compared with
    guesses: list[_Guesses]  # of each drafter
    n_discarded: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.n_discarded = self.request.n_discarded

    @property
    def is_void(self) -> bool:
        """True if the slot has another text by now."""
        request = self.request
        return self.slot.request is not request or self.n_discarded != request.n_discarded

    def ask(self, length: int) -> DraftRequest:
        slot, request = self.slot, self.request
        assert slot.seq is not None
        return DraftRequest(
            slot.id, request.tokens, request.task.root, length, slot.seq.id, slot.n_pending
        )

    def check(self, n_rested: int) -> None:
        """Compare the guesses with what came since the last time. `n_rested` steps asked none."""
        new = self.request.keys[self.n_keys :]
        self.n_keys += len(new)
        for guess in self.guesses:
            guess.wait = max(0, guess.wait - n_rested)
            if guess.tokens and new:
                guess.check(new)


class Drafts:
    """Gives drafts to the slots in decode. One drafter after the other is asked for each slot.

    The length of a draft depends on how much of the slot's last guesses was right, and on what
    rows cost in this step. A guess of a drafter that is free is compared with the output even if
    none of it was decoded, so that a slot whose text does not repeat itself costs nothing.

    Args:
        scheduler: has the slots.
        drafters: those to ask, in this order.
    """

    def __init__(self, scheduler: Scheduler, drafters: Sequence[Drafter]) -> None:
        self._scheduler = scheduler
        self._is_even = scheduler.rollback.is_even
        self._known: dict[int, _Stream] = {}  # by slot
        self._given: dict[int, int] = {}  # by slot: the place of the drafter of its last draft
        self.costs = StepCosts()
        self._balance = Balance()
        # Of this step: what the drafters have taken, what it would take without drafts, for how
        # many streams, and what drafts have brought.
        self._asking_s = self._plain_s = 0.0
        self._n_streams = self._n_accepted = 0
        self._has_drafts = False
        # Steps without asking a drafter: as many as may come, and those that came.
        self._rest = self._n_rested = 0
        self.use(drafters)

    def use(self, drafters: Sequence[Drafter]) -> None:
        """Ask these, in this order, and no others. To be called before the first step."""
        self._drafters = tuple(drafters)
        self._general = [_Guesses() for _ in drafters]
        self._counts = [DraftCounts(drafter.name) for drafter in drafters]
        #: Slots may have drafts. Without, there is nothing to propose or to observe.
        self.is_on = bool(drafters) and self._scheduler.rollback.n_max > 0

    @property
    def counts(self) -> tuple[DraftCounts, ...]:
        """The outcome of the drafts of each drafter; empty where slots have no drafts."""
        return tuple(self._counts) if self.is_on else ()

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()

    def propose(self) -> None:
        """Give drafts to slots. To be called before `Scheduler.schedule`."""
        self._asking_s, self._n_accepted = 0.0, 0
        if self._is_even:  # those that another turn has left would be of another length
            self._scheduler.drop_drafts()
        streams = self._streams()
        self._n_streams = n_streams = len(streams)
        n_rows = sum(stream.slot.n_pending for stream in streams)
        self._plain_s = self.costs.seconds(n_rows)
        if not streams:
            self._judge_alone()
        can_rest = self.costs.is_known(n_rows) and not any(one.request.draft for one in streams)
        self._rest, self._n_rested = MAX_REST if can_rest else 0, 0
        streams = [stream for stream in streams if not stream.request.draft]
        for i in range(len(self._drafters)):
            if not streams:
                break
            n_drafted, streams = self._ask(i, streams, n_streams, n_rows)
            n_rows = max(n_rows, n_drafted) if self._is_even else n_rows + n_drafted
        if self._is_even:
            self._scheduler.even_out()

    def rest(self) -> bool:
        """True if the next step has no draft, unless a request comes or goes. Counts such steps."""
        is_over = self._n_rested >= self._rest
        self._n_rested += not is_over
        return not is_over

    def settle(self, slot: Slot, tokens: list[TokenId]) -> None:
        """Keep the part of a slot's draft that matches these tokens, and take back the rest."""
        request = slot.request
        assert request is not None
        n_right, n_drafted = shared_length(request.draft, tokens), len(request.draft)
        if n_guessed := n_drafted - request.n_padded:
            n_accepted = min(n_right, n_guessed)
            request.n_drafts += 1
            request.n_drafted += n_guessed
            request.n_accepted += n_accepted
            if (place := self._given.get(slot.id)) is not None:
                self._counts[place] = self._counts[place].plus(1, n_guessed, n_accepted)
        self._n_accepted += n_right
        self._has_drafts = True
        self._scheduler.roll_back(slot, n_drafted - n_right)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn what a step has cost.

        Steps with only a prompt measure many rows before any draft does; these have no logits, so
        they are somewhat cheaper. Steps with both a prompt and streams are not used.
        """
        has_drafts, self._has_drafts = self._has_drafts, False
        is_prompt = plan.n_decode == 0 and plan.n_cells >= MIN_PROMPT
        if is_prompt or not plan.n_prefill:
            self.costs.observe(plan.n_cells, max(0.0, seconds - self._asking_s))
        if not has_drafts:
            self._balance.forgive()
        elif self._plain_s and not plan.n_prefill:
            seconds = self.costs.seconds(plan.n_cells) + self._asking_s
            self._balance.add(self._n_accepted, self._n_streams, seconds / self._plain_s)

    # -- the slots

    def _streams(self) -> list[_Stream]:
        """Compare all guesses with the output. Returns the slots that decode."""
        streams = []
        for slot in self._scheduler.slots:
            request, known = slot.request, self._known.get(slot.id)
            if known is not None and known.is_void:
                self._forget(slot.id)
                known = None
            if request is None or not slot.decodes:
                continue
            if known is None:
                guesses = [self._begin(i) for i in range(len(self._drafters))]
                known = self._known[slot.id] = _Stream(slot, request, len(request.keys), guesses)
            known.check(self._n_rested)
            streams.append(known)
        return streams

    def _begin(self, i: int) -> _Guesses:
        """Start with a drafter's latest acceptance rate, unless that depends on the text alone."""
        if self._drafters[i].is_free:
            return _Guesses()
        general = self._general[i]
        return _Guesses(
            acceptance=general.acceptance.expectation(),
            wait=general.pause - 1,
            pause=general.pause,
            general=general,
        )

    def _forget(self, slot_id: int) -> None:
        del self._known[slot_id]
        for drafter in self._drafters:
            drafter.forget(slot_id)

    # -- asking

    def _judge_alone(self) -> None:
        """Tell the drafters whether they are worth their time: there are only prompts."""
        slots, n_waiting = self._scheduler.slots, len(self._scheduler.waiting)
        n_busy = min(len(slots), n_waiting + sum(slot.request is not None for slot in slots))
        for drafter in (one for one in self._drafters if not one.is_free):
            limits = [min(drafter.n_max, self._scheduler.rollback.n_max)] * n_busy
            could = self._could_pay(limits, n_busy, n_busy, drafter.step_s)
            drafter.pays = could or not self.costs.is_known(n_busy)

    def _could_pay(self, limits: list[int], n_streams: int, n_rows: int, step_s: float) -> bool:
        """True if drafts would pay if they were good."""
        chances = [GOOD] * len(limits)
        return any(self._share_rows(limits, chances, n_streams, n_rows, step_s))

    def _share_rows(
        self,
        limits: list[int],
        chances: list[float],
        n_streams: int,
        n_rows: int,
        step_s: float,
    ) -> list[int]:
        return share_rows(limits, chances, self.costs, n_streams, n_rows, step_s, self._is_even)

    def _ask(
        self, i: int, streams: list[_Stream], n_streams: int, n_rows: int
    ) -> tuple[int, list[_Stream]]:
        """Ask a drafter; returns how many tokens it drafts, and the slots that have no draft."""
        # A free drafter guesses first, and then the lengths are chosen; others are asked for them.
        drafter = self._drafters[i]
        is_free, step_s = drafter.is_free, drafter.step_s
        if is_free:
            self._rest = 0
            self._make_guesses(i, streams, [MAX_GUESS] * len(streams))
        most = self._scheduler.rows_for_drafts()
        if self._is_even:
            most //= n_streams
        limits = [min(most, self._limit(stream, i)) for stream in streams]
        chances = [stream.guesses[i].acceptance.probability for stream in streams]
        if self._balance.is_good:
            lengths = self._share_rows(limits, chances, n_streams, n_rows, step_s)
        else:  # drafters that are not free may be probed
            lengths = [0] * len(limits)
        if not is_free:
            if self.costs.is_known(n_rows):
                drafter.pays = any(lengths)
            for place, stream in enumerate(streams):
                guess = stream.guesses[i]
                guess.tokens = []
                if lengths[place]:
                    guess.set_pause(1)
                elif (
                    limits[place]
                    and guess.probe(n_streams)
                    and self._could_pay(limits, n_streams, n_rows, step_s)
                ):
                    lengths[place] = min(PROBE, limits[place])
                if limits[place]:
                    self._rest = min(self._rest, 0 if lengths[place] else guess.wait)
            self._make_guesses(i, streams, lengths)
        drafts, left = [], []
        for stream, length in zip(streams, lengths, strict=True):
            draft = stream.guesses[i].tokens[:length]
            if draft:
                drafts.append((stream.slot, draft))
                self._given[stream.slot.id] = i
            else:
                left.append(stream)
        n_drafted = self._scheduler.propose(drafts)
        if self._is_even and drafts:
            n_drafted = n_streams * (1 + max(len(draft) for _, draft in drafts))
        return n_drafted, left

    def _limit(self, stream: _Stream, i: int) -> int:
        """The most tokens of a draft that its text has room for, or a guess."""
        room = min(stream.slot.room_for_draft(self._scheduler.n_ctx_seq), stream.request.n_left - 1)
        room = min(room, self._scheduler.rollback.n_max)
        if self._is_even and stream.request.n_ahead:
            return 0
        draft_max = stream.request.task.params.draft_max
        if draft_max >= 0:
            room = min(room, draft_max)
        if self._drafters[i].is_free:
            return min(room, len(stream.guesses[i].tokens))
        return max(0, min(room, self._drafters[i].n_max))

    def _make_guesses(self, i: int, streams: list[_Stream], lengths: list[int]) -> None:
        """Have a drafter make guesses of these lengths, if it has none or is not free."""
        drafter = self._drafters[i]
        asked: list[_Guesses] = []
        requests: list[DraftRequest] = []
        for stream, length in zip(streams, lengths, strict=True):
            guess = stream.guesses[i]
            if length and not guess.tokens:
                asked.append(guess)
                requests.append(stream.ask(length))
        if not requests:
            return
        start = perf_counter()
        drafts = drafter.propose(requests)
        for guess, draft in zip(asked, drafts, strict=True):
            guess.tokens = list(draft or ())
            if draft is None:  # it has first to catch up with the text
                guess.wait = 0
                guess.set_pause(guess.last_pause)
        self._asking_s += perf_counter() - start
