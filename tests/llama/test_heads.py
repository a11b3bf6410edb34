"""Drafts by heads: the output is the same, and the head has read what the model has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.drafted import KINDS, Drafted, Hand, Settings, kinds, load, plain, write_head
from tests.support.step_costs import FlatCosts, SteepCosts
from trioserve.engine import DraftRequest
from trioserve.errors import DecodeError, KVCacheFullError
from trioserve.llama import heads
from trioserve.llama.heads import FEW, LOGGED, MANY, HeadDrafter
from trioserve.types import CacheRoot, SamplingParams
from trioserve.types.task import shared_length

PROMPTS = ("Once upon a time", "The red ball is", "One two three four five six", "a b c d e f g")


@pytest.fixture(scope="module", params=kinds(*(kind for kind in KINDS if kind != "deepseek2")))
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A model with a head that is right about as often as not."""
    return write_head(tmp_path_factory.mktemp("good"), request.param, is_good=True)


@pytest.fixture(scope="module", params=kinds(*KINDS))
def random(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A model with a head whose guesses hang on all that it has read."""
    return write_head(tmp_path_factory.mktemp("random"), request.param, is_good=False)


@pytest.mark.parametrize("layout", [{"kv_unified": True}, {}])
def test_the_output_is_the_same_in_all_slots(good: Settings, layout: dict[str, object]) -> None:
    expected = plain(good, PROMPTS, 60)
    bench = Drafted(good, **layout)
    for i, prompt in enumerate(PROMPTS):
        bench.submit(i, prompt, 60)
    bench.run()
    bench.backend.close()
    assert [bench.tokens[i] for i in range(len(PROMPTS))] == expected
    n_drafted = sum(end.timings.draft_n for end in bench.finished.values())
    assert 20 < bench.n_accepted < n_drafted


def test_sampled_output_is_the_same_for_a_seed(good: Settings) -> None:
    sampling = SamplingParams(temperature=0.8, seed=7)
    expected = plain(good, PROMPTS[:2], 60, sampling=sampling)
    bench = Drafted(good)
    for i, prompt in enumerate(PROMPTS[:2]):
        bench.submit(i, prompt, 60, sampling=sampling)
    bench.run()
    bench.backend.close()
    assert [bench.tokens[i] for i in range(2)] == expected
    assert bench.n_accepted


def test_a_prompt_that_shares_its_beginning_has_the_drafts_of_a_fresh_one(good: Settings) -> None:
    shared = " ".join(PROMPTS) * 3
    prompts = [f"{shared} {ending}" for ending in ("a red ball", "three words", "x y z")]
    runs = []
    for reuses in (True, False):
        bench = Drafted(good, kv_unified=True)
        runs.append(note_drafts(bench.head))
        n_shared = len(bench.backend.vocab.tokenize(shared))
        for i, prompt in enumerate(prompts):
            bench.submit(i, prompt, 40, cache_prompt=reuses)
            bench.run()
        timings = [bench.finished[i].timings for i in range(len(prompts))]
        bench.backend.close()
        assert all((one.cache_n > n_shared - 8) == reuses for one in timings[1:])
    reused, fresh = runs
    places = (
        reused.keys() & fresh.keys()
    )  # how often and for how much it is asked hangs on the time
    assert len(places) > 10
    for place in places:
        n = shared_length(reused[place], fresh[place])
        assert n == min(len(reused[place]), len(fresh[place]))


def note_drafts(head: HeadDrafter) -> dict[tuple[int, ...], list[int]]:
    """Returns what will hold the drafts of a head, by the text so far."""
    drafts: dict[tuple[int, ...], list[int]] = {}
    propose: Any = head.propose

    def noting(requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        made: list[list[int] | None] = propose(requests)
        for request, draft in zip(requests, made, strict=True):
            if draft:
                drafts[tuple(request.keys)] = draft
        return made

    head.propose = noting  # type: ignore[method-assign]
    return drafts


class Computing:
    """Counts the rows that a head computes."""

    def __init__(self, drafter: HeadDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_rows = 0
        context: Any = drafter._context
        decode = context.decode

        def counting(batch: Any, **options: bool) -> None:
            self.n_rows += len(batch)
            decode(batch, **options)

        monkeypatch.setattr(context, "decode", counting)


def test_while_drafts_do_not_pay_the_head_computes_nothing(
    good: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(good, PROMPTS, 150)
    bench = Drafted(good)
    bench.head._most_unread = 2 * MANY
    computing = Computing(bench.head, monkeypatch)
    bench.engine.drafts.costs = SteepCosts()
    for i, prompt in enumerate(PROMPTS):
        bench.submit(i, prompt, 150)
    while any(len(bench.tokens[i]) < 120 for i in range(len(PROMPTS))):
        bench.step()
    assert computing.n_rows == 0
    bench.engine.drafts.costs = FlatCosts()
    bench.run()
    bench.backend.close()
    assert computing.n_rows
    assert bench.n_accepted
    assert [bench.tokens[i] for i in range(len(PROMPTS))] == expected


# -- the head itself


@pytest.fixture
def hand(random: Settings) -> Iterator[Hand]:
    with load(random, parallel=4) as backend:
        yield Hand(backend)


def words(n: int, first: int = 300) -> list[int]:
    return [first + i * i % 97 for i in range(n)]


def alone(hand: Hand, tokens: Sequence[int], newest: int) -> list[int]:
    """The draft for a text that a sequence has been given in one batch."""
    seq, pays = hand.backend.n_seqs - 1, hand.drafter.pays
    hand.cut(seq, 0)
    hand.drafter.pays = True  # so that the head reads all of it
    hand.extend((seq, tokens))
    hand.drafter.pays = pays
    (draft,) = hand.draft({seq: newest})
    hand.cut(seq, 0)
    assert len(draft) == 4
    return draft


@pytest.mark.parametrize("n", [1, FEW, FEW + 1, MANY + 1, 700])
def test_a_text_is_read_in_any_pieces(hand: Hand, n: int) -> None:
    text = words(n)
    expected = alone(hand, text, 400)
    for token in text[: 2 * MANY]:
        hand.extend((0, [token]))
    if text[2 * MANY :]:
        hand.extend((0, text[2 * MANY :]))
    assert hand.draft({0: 400}) == [expected]
    hand.drafter.check_integrity()


def test_drafts_of_several_texts_are_made_together(hand: Hand) -> None:
    texts = {seq: words(5 + 9 * seq, 280 + seq) for seq in range(3)}
    expected = [alone(hand, text, 400 + seq) for seq, text in texts.items()]
    hand.extend(*texts.items())
    assert hand.draft({seq: 400 + seq for seq in texts}) == expected
    assert hand.draft({1: 401}) == expected[1:2]  # again: guesses leave nothing behind


def test_a_text_goes_on_from_earlier(hand: Hand) -> None:
    text = words(100)
    for back in (0, 1, 15, 50, 98, 99):
        hand.cut(0, 0)
        hand.extend((0, text))
        hand.draft({0: 401})
        hand.cut(0, 100 - back)
        assert hand.has_all(0)
        assert hand.draft({0: 400}) == [alone(hand, text[: 100 - back], 400)]
        hand.drafter.check_integrity()


def test_a_text_is_read_when_a_draft_is_wanted(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    text = words(300)
    expected = alone(hand, text, 400)
    computing = Computing(hand.drafter, monkeypatch)
    hand.drafter.pays = False
    hand.extend((0, text[:200]))
    for token in text[200:]:
        hand.extend((0, [token]))
    assert computing.n_rows == 0
    assert hand.draft({0: 400}) == [expected]


def test_a_head_catches_up_in_pieces(hand: Hand) -> None:
    hand.drafter.pays = False
    hand.drafter._token_s = 1.0  # as if it took long
    hand.extend((0, words(300)))
    request = DraftRequest(0, [*words(300), 400], CacheRoot(), 4, 0)
    drafts = []
    while not drafts or drafts[-1] is None:
        drafts += hand.drafter.propose([request])
        hand.drafter.check_integrity()
    assert len(drafts) > 3
    assert drafts[-1] == alone(hand, words(300), 400)


def test_what_is_dropped_is_a_gap(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text behind a gap is one that the head has read without that part."""
    most = hand.drafter._most_unread = 2 * MANY
    text = words(100)
    hand.extend((0, text))
    hand.draft({0: 401})
    hand.drafter.pays = False
    for token in words(3 * most, 250):
        hand.extend((0, [token]))
    of_head = hand.drafter._texts[0]
    ((start, stop),) = of_head.gaps
    assert start == 100 < stop < of_head.end
    assert len(of_head.tokens) <= most + LOGGED
    hand.draft({0: 400})
    hand.drafter.check_integrity()
    held = hand.drafter._context.memory.last(0) + 1
    assert held >= of_head.end - (stop - start) - of_head.shift
    hand.cut(0, 50)
    assert hand.has_all(0)
    assert hand.draft({0: 400}) == [alone(hand, text[:50], 400)]


def test_all_rows_together_take_bounded_memory(
    random: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "MAX_BYTES", 2**20)
    with load(random, parallel=4) as backend:
        hand = Hand(backend)
        hand.drafter.pays = False
        for _ in range(10):
            hand.extend(*((seq, words(60)) for seq in range(4)))
        n_bytes = sum(rows.nbytes for text in hand.drafter._texts for rows in text.rows)
        assert n_bytes <= 2**20


def test_a_copy_and_a_saved_text_have_drafts_at_once(hand: Hand) -> None:
    text = words(60)
    hand.extend((0, text[:50]))
    hand.draft({0: 400})
    hand.extend((0, text[50:]))  # not read yet
    hand.memory.copy(0, 1)
    state = hand.memory.save(0)
    assert len(state) == hand.memory.size(0)
    hand.memory.restore(2, state)
    hand.texts[1] = hand.texts[2] = hand.texts[0]
    expected = alone(hand, text, 400)
    assert hand.draft({0: 400, 1: 400, 2: 400}) == [expected] * 3


def test_a_state_of_the_model_alone_has_drafts_behind_it(hand: Hand) -> None:
    text = words(60)
    hand.extend((0, text))
    hand.memory.restore(1, hand.backend._context.memory.save(0))
    hand.texts[1] = hand.texts[0]
    assert hand.draft({1: 400}) == [[]]  # the row for it is missing
    hand.extend((1, [400]))
    (draft,) = hand.draft({1: 401})
    assert len(draft) == 4
    hand.drafter.check_integrity()


def test_a_token_that_the_model_has_yet_to_read_before_the_newest(hand: Hand) -> None:
    hand.extend((0, words(20)))
    keys = [*words(20), 300, 301]
    assert hand.drafter.propose([DraftRequest(0, keys, CacheRoot(), 4, 0, 2)]) == [[]]


class Failing:
    """A context of a head whose decodes fail while `error` is set."""

    def __init__(self, drafter: HeadDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        context: Any = drafter._context
        decode = context.decode

        def maybe(batch: Any, **options: bool) -> None:
            if self.error is not None:
                raise self.error
            decode(batch, **options)

        monkeypatch.setattr(context, "decode", maybe)


def test_a_full_cache_costs_what_was_read(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(hand.drafter, monkeypatch)
    hand.extend((0, words(20)), (1, words(9)))
    failing.error = KVCacheFullError("full")
    assert hand.draft({0: 400, 1: 400}) == [[], []]
    failing.error = None
    assert [len(draft) for draft in hand.draft({0: 400, 1: 400})] == [4, 4]
    hand.drafter.check_integrity()


def test_a_head_that_fails_is_not_used_again(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(hand.drafter, monkeypatch)
    failing.error = DecodeError("broken")
    hand.extend((0, words(50)))  # is read at once, or has nothing to read
    hand.draft({0: 400})
    failing.error = None
    hand.extend((0, [300]))
    assert hand.draft({0: 400}) == [[]]


# -- whatever becomes of the sequences

N_SEQS, N_MAX = 3, 4
seqs = st.integers(0, N_SEQS - 1)
pieces = st.lists(st.integers(260, 480), min_size=1, max_size=MANY + 8)


class HeadMachine(RuleBasedStateMachine):
    """Sequences grow, together and alone, are cut, copied, saved and restored."""

    model: Settings

    @initialize()
    def load(self) -> None:
        self.hand = Hand(load(self.model, parallel=N_SEQS + 1, cache_seqs=0, ctx_size=4096))
        self.hand.drafter._most_unread = 2 * MANY
        self.saved: list[tuple[tuple[int, ...], bytes]] = []

    def teardown(self) -> None:
        if hasattr(self, "hand"):
            self.hand.backend.close()

    @rule(added=st.dictionaries(seqs, pieces, min_size=1))
    def extend(self, added: dict[int, list[int]]) -> None:
        if all(len(self.hand.texts[seq]) < 300 for seq in added):
            self.hand.extend(*added.items())

    @rule(pays=st.booleans())
    def judge(self, pays: bool) -> None:
        self.hand.drafter.pays = pays

    @rule(seq=seqs, back=st.integers(0, 2 * MANY))
    def cut(self, seq: int, back: int) -> None:
        length = max(0, len(self.hand.texts[seq]) - back)
        # As the engine does: a window that others have used the cells of is computed again.
        if self.hand.memory.first(seq) > max(0, length - self.hand.backend.sliding_window):
            length = 0
        if back > 0:
            self.hand.cut(seq, length)

    @rule(source=seqs, other=seqs)
    def copy(self, source: int, other: int) -> None:
        if source != other:
            self.hand.copy(source, other)

    @rule(seq=seqs)
    def save(self, seq: int) -> None:
        if self.hand.texts[seq]:
            self.saved.append((self.hand.texts[seq], self.hand.memory.save(seq)))

    @precondition(lambda self: self.saved)
    @rule(seq=seqs, data=st.data())
    def restore(self, seq: int, data: st.DataObject) -> None:
        text, state = data.draw(st.sampled_from(self.saved))
        self.hand.cut(seq, 0)
        self.hand.memory.restore(seq, state)
        self.hand.texts[seq] = text

    @rule(newest=st.dictionaries(seqs, st.integers(260, 480), min_size=1))
    def draft(self, newest: dict[int, int]) -> None:
        newest = {seq: one for seq, one in newest.items() if self.hand.texts[seq]}
        drafts = self.hand.draft(newest, N_MAX)
        for (seq, token), draft in zip(newest.items(), drafts, strict=True):
            assert 0 < len(draft) <= N_MAX
            if self.hand.has_all(seq):
                text = self.hand.texts[seq]
                # Later guesses build on rounding errors of the batch that they are made in.
                assert draft[0] == alone(self.hand, text, token)[0]

    @invariant()
    def llama_cpp_holds_what_is_believed(self) -> None:
        if hasattr(self, "hand"):
            self.hand.drafter.check_integrity()


def test_the_head_reads_what_the_model_has(random: Settings) -> None:
    class Machine(HeadMachine):
        model = random

    phases = [Phase.explicit, Phase.generate]  # a failure is not made smaller, which takes minutes
    quick = settings(max_examples=4, stateful_step_count=25, deadline=None, phases=phases)
    run_state_machine_as_test(Machine, settings=quick)
