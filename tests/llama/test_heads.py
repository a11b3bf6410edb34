"""Drafts by heads: the output is the same, and the head has read what the model has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.drafted import KINDS, Drafted, Settings, plain, write_head
from tests.support.llama_server import LLAMA_SERVER, llama_server
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import DraftRequest
from trioserve.errors import DecodeError, KVCacheFullError
from trioserve.llama import LlamaBackend
from trioserve.llama.head_texts import KEPT_ROWS
from trioserve.llama.heads import FEW, MANY, HeadDrafter
from trioserve.types import CacheRoot, SamplingParams

PROMPTS = ("Once upon a time", "The red ball is", "One two three four five six", "a b c d e f g")


@pytest.fixture(scope="module", params=KINDS)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A model with a head that is right about as often as not."""
    return write_head(tmp_path_factory.mktemp("good"), request.param, is_good=True)


@pytest.fixture(scope="module", params=KINDS)
def random(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A model with a head whose guesses hang on all that it has read."""
    return write_head(tmp_path_factory.mktemp("random"), request.param, is_good=False)


def load(settings: Settings, **more: object) -> LlamaBackend:
    backend = llama.load(Config(threads=1, **{**settings, **more}))
    assert isinstance(backend, LlamaBackend)
    return backend


def drafter_of(backend: LlamaBackend) -> HeadDrafter:
    (drafter,) = backend.drafters
    assert isinstance(drafter, HeadDrafter)
    return drafter


@pytest.mark.parametrize("layout", [{"kv_unified": True}, {"kv_unified": False}, {}])
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


# -- the head itself


@attrs.frozen
class Text:
    """What a sequence holds, and whether the head has had a row for each of its tokens."""

    tokens: tuple[int, ...] = ()
    is_exact: bool = True


class Hand:
    """A model with a head, used without an engine. Each sequence has a text."""

    def __init__(self, backend: LlamaBackend) -> None:
        self.backend, self.drafter = backend, drafter_of(backend)
        self.memory = backend.memory
        self.texts = [Text()] * backend.n_seqs

    def extend(self, *added: tuple[int, Sequence[int]]) -> list[int]:
        """Decode tokens of some sequences together; returns the best token after each."""
        batch = self.backend.batch
        batch.clear()
        rows = []
        for seq, tokens in added:
            rows.append(batch.extend(tokens, len(self.texts[seq].tokens), seq))
            batch.want_logits(rows[-1])
            text = self.texts[seq]
            self.texts[seq] = attrs.evolve(text, tokens=(*text.tokens, *tokens))
        self.backend.decode()
        with self.backend.sampler(SamplingParams(temperature=0.0), ()) as sampler:
            return [sampler.sample(row) for row in rows]

    def draft(self, newest: dict[int, int], n_max: int = 4) -> list[list[int]]:
        """Ask for drafts of some sequences, each with a token that is not decoded yet."""
        return self.drafter.propose([
            DraftRequest(seq, [*self.texts[seq].tokens, token], CacheRoot(), n_max, seq)
            for seq, token in newest.items()
        ])  # fmt: skip

    def cut(self, seq: int, length: int) -> None:
        text = self.texts[seq]
        self.memory.remove(seq, length)
        of_head = self.drafter._texts[seq]
        has_row = not length or of_head.before is not None or bool(of_head.tokens)
        is_exact = not length or (text.is_exact and has_row)
        self.texts[seq] = Text(text.tokens[:length], is_exact)


@pytest.fixture
def hand(random: Settings) -> Iterator[Hand]:
    with load(random) as backend:
        yield Hand(backend)


def words(n: int, first: int = 300) -> list[int]:
    return [first + i * i % 97 for i in range(n)]


def alone(hand: Hand, tokens: Sequence[int], newest: int) -> list[int]:
    """The draft for a text that a sequence has been given in one batch."""
    seq = hand.backend.n_seqs - 1
    hand.cut(seq, 0)
    hand.extend((seq, tokens))
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


def test_a_text_goes_on_from_a_little_earlier(hand: Hand) -> None:
    text = words(100)
    for back in (1, KEPT_ROWS - 1):
        hand.cut(0, 0)
        hand.extend((0, text))
        hand.draft({0: 401})
        hand.cut(0, 100 - back)
        assert hand.texts[0].is_exact
        assert hand.draft({0: 400}) == [alone(hand, text[: 100 - back], 400)]


def test_a_text_goes_on_from_far_earlier(hand: Hand) -> None:
    text = words(100)
    hand.extend((0, text))
    hand.cut(0, 50)
    assert not hand.texts[0].is_exact
    hand.extend((0, text[50:53]))
    (draft,) = hand.draft({0: 400})
    assert len(draft) == 4
    hand.drafter.check_integrity()


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

        def maybe(batch: Any) -> None:
            if self.error is not None:
                raise self.error
            decode(batch)

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
    hand.extend((0, words(50)))  # is read at once
    failing.error = None
    hand.extend((0, [300]))
    assert hand.draft({0: 400}) == [[]]


# -- whatever becomes of the sequences

N_SEQS, N_MAX = 3, 4
seqs = st.integers(0, N_SEQS - 1)
pieces = st.lists(st.integers(260, 480), min_size=1, max_size=MANY + 8)


class HeadMachine(RuleBasedStateMachine):
    """Sequences grow, together and alone, are cut, copied, saved and restored."""

    settings: Settings

    @initialize()
    def load(self) -> None:
        self.hand = Hand(load(self.settings, parallel=N_SEQS + 1, cache_seqs=0, ctx_size=4096))
        self.saved: list[tuple[Text, bytes]] = []

    def teardown(self) -> None:
        if hasattr(self, "hand"):
            self.hand.backend.close()

    @rule(added=st.dictionaries(seqs, pieces, min_size=1))
    def extend(self, added: dict[int, list[int]]) -> None:
        if all(len(self.hand.texts[seq].tokens) < 300 for seq in added):
            self.hand.extend(*added.items())

    @rule(seq=seqs, back=st.integers(0, 2 * KEPT_ROWS))
    def cut(self, seq: int, back: int) -> None:
        length = len(self.hand.texts[seq].tokens)
        if 0 < back:
            self.hand.cut(seq, max(0, length - back))

    @rule(source=seqs, target=seqs)
    def copy(self, source: int, target: int) -> None:
        if source != target:
            self.hand.cut(target, 0)
            self.hand.memory.copy(source, target)
            self.hand.texts[target] = self.hand.texts[source]

    @rule(seq=seqs)
    def save(self, seq: int) -> None:
        if self.hand.texts[seq].tokens:
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
        newest = {seq: one for seq, one in newest.items() if self.hand.texts[seq].tokens}
        drafts = self.hand.draft(newest, N_MAX)
        for (seq, token), draft in zip(newest.items(), drafts, strict=True):
            text = self.hand.texts[seq]
            assert 0 < len(draft) <= N_MAX
            if text.is_exact:
                assert draft == alone(self.hand, text.tokens, token)[: len(draft)]

    @invariant()
    def llama_cpp_holds_what_is_believed(self) -> None:
        if hasattr(self, "hand"):
            self.hand.drafter.check_integrity()


def test_the_head_reads_what_the_model_has(random: Settings) -> None:
    class Machine(HeadMachine):
        settings = random

    quick = settings(max_examples=8, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Machine, settings=quick)


# -- llama-server


@pytest.mark.skipif(LLAMA_SERVER is None, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize("n_max", [1, 3, 6])
def test_as_many_guesses_are_right_as_in_llama_server(good: Settings, n_max: int) -> None:
    n = 64
    with load(good, parallel=1, spec_draft_n_max=n_max) as backend:
        hand = Hand(backend)
        prompt = backend.vocab.tokenize(PROMPTS[2])
        (newest,) = hand.extend((0, prompt))
        said, n_drafted, n_right = [newest], 0, 0
        while len(said) < n:
            (draft,) = hand.draft({0: newest}, min(n_max, n - len(said)))
            n_drafted += len(draft)
            for guess in [*draft, None]:
                (token,) = hand.extend((0, [newest]))
                said.append(token)
                newest = token
                if token != guess:
                    break
                n_right += 1
    flags = ["-m", good["model"], "-np", "1", "-c", "1024", "-t", "1", "--spec-draft-p-min", "0"]
    flags += ["--spec-type", *good["spec_type"], "--spec-draft-n-max", str(n_max)]
    if "spec_draft_model" in good:
        flags += ["-md", good["spec_draft_model"]]
    flags += ["-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32"]
    with llama_server(flags) as client:
        answer = client.post(
            "/completion",
            json={
                "prompt": list(prompt),
                "n_predict": n,
                "temperature": 0,
                "return_tokens": True,
                "cache_prompt": False,
            },
        ).json()
    assert answer["tokens"] == said[:n]
    timings = answer["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (n_drafted, n_right)
