"""`Planner`: what a step decodes, of what the runs in slots have to decode."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.engine.adapter_turns import AdapterTurns
from trioserve.engine.encoder import Encoder
from trioserve.engine.slot import Slot, arrival
from trioserve.engine.strategy import BatchStrategy
from trioserve.engine.work import MediaWork, Plan, Work
from trioserve.types import Adapters

#: Seconds for which one set of adapters keeps the turn while others wait. To change adapters takes
#: llama.cpp a few milliseconds, in which it plans its buffers.
TURN_S = 0.02


class Planner:
    """Fills steps.

    A batch has tokens or embeddings of media, never both. So a step with media holds up the
    streams, and one with nothing but their tokens follows. For the strategy, the two are one::

        one step | media of prompts | tokens of streams |
        another  | tokens of prompts and of streams     |

    While some prompts go on with media and others with tokens, they take turns.

    Args:
        strategy: how a step is shared between decode and prefill.
        n_batch: the most cells of one step.
        unified: whether all sequences share the cells of the KV cache.
        has_adapters: runs may have LoRA adapters, so that not all fit in one batch.
        encoder: makes embeddings of media; None: there is only text.
    """

    def __init__(
        self,
        strategy: BatchStrategy,
        *,
        n_batch: int,
        unified: bool,
        has_adapters: bool = False,
        encoder: Encoder | None = None,
    ) -> None:
        self._strategy = strategy
        self._n_batch = n_batch
        self._by_sequence = not unified
        self._encoder = encoder
        self.turns = AdapterTurns(TURN_S) if has_adapters else None
        self._was_media = False  # the last step that had anything of a prompt
        self._owes_streams = False  # the last step had media, and streams waited for it
        self._held_up: tuple[int, float] = 0, 0.0  # its cells, and its seconds

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that the step is to be computed with."""
        return self.turns.current if self.turns is not None else ()

    def plan(self, slots: Sequence[Slot]) -> Plan:
        """Give every decoding slot its token and its draft, and prompts what the strategy says."""
        self.ask_for_media(slots)
        active = [  # `Slot.has_work`, without a call for each of many
            slot
            for slot in slots
            if (run := slot.run) is not None and not run.paused and not slot.awaits_media
        ]
        turn = active if self.turns is None else _whose_turn(active, self.turns)
        steps, drafts, prompts = [], [], []
        for slot in turn:
            if not slot.in_decode:
                prompts.append(slot)
            elif (run := slot.run) is not None and (run.draft or run.n_ahead):
                drafts.append(Work(slot, slot.n_pending, True))
            else:
                steps.append(slot)
        has_streams = bool(steps or drafts)
        if prompts:
            prompts = self._whose_kind(sorted(prompts, key=arrival), has_streams)
        self._owes_streams = False
        if not prompts:
            return Plan.of(steps, drafts, by_sequence=self._by_sequence)
        pending = [slot.n_alike for slot in prompts]
        # Streams that decode in another turn are held up by this step, too.
        n_decode = sum(slot.in_decode for slot in active)
        is_media, budget = prompts[0].is_at_media, self._n_batch
        if not is_media:
            budget -= len(steps) + sum(work.n_cells for work in drafts)
        shares = self._strategy.share(pending, n_decode, budget)
        if not any(shares) and not has_streams:  # what decodes is of another turn
            shares = self._strategy.share(pending, 0, budget)
        shared = [(slot, n) for slot, n in zip(prompts, shares, strict=True) if n]
        if shared:
            self._was_media = is_media
        if shared and is_media:
            self._owes_streams = has_streams
            return Plan.of_media(self._media_of(shared))
        parts = [Work(slot, slot.up_to_place(n_cells), False) for slot, n_cells in shared]
        return Plan.of(steps, drafts + parts, by_sequence=self._by_sequence)

    def observe(self, plan: Plan, seconds: float) -> None:
        """Tell the strategy what a step has cost.

        One with media, for which streams have waited, counts with that in which they go on.
        """
        n_cells, before = self._held_up
        n_cells, seconds = n_cells + plan.n_prefill, before + seconds
        if plan.is_media and self._owes_streams:
            self._held_up = n_cells, seconds
        else:
            self._held_up = 0, 0.0
            self._strategy.observe(n_cells, plan.n_decode, seconds)

    # -- media

    def ask_for_media(self, slots: Sequence[Slot]) -> None:
        """Have the media of prompts encoded, and see which slots cannot go on without them."""
        if self._encoder is None:
            return
        prompts = [
            slot
            for slot in slots
            if not slot.in_decode and slot.run is not None and slot.run.task.prompt.media
        ]
        self._encoder.want(
            {
                slot.run.task.id: ahead
                for slot in prompts
                if slot.run is not None and (ahead := slot.media_ahead())
            }
        )
        for slot in prompts:
            chunk = slot.media_now()
            slot.awaits_media = chunk is not None and self._encoder.get(chunk) is None

    def _whose_kind(self, prompts: list[Slot], has_streams: bool) -> list[Slot]:
        """Pick the prompts that go on with tokens, or those that go on with media."""
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
                works.append(MediaWork(slot, n_cells, False, chunk, embeddings))
            elif not works:
                return [MediaWork(slot, chunk.n_cells, False, chunk, embeddings)]
        return works


def _whose_turn(active: list[Slot], turns: AdapterTurns) -> list[Slot]:
    """Pick the slots that may be in one batch."""
    adapters = [slot.run.task.root.adapters for slot in active if slot.run is not None]
    turn = turns.take(adapters)
    return [slot for slot, its in zip(active, adapters, strict=True) if its == turn]
