"""The drafter itself, on the bundled model as its own draft model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.engine_events import take_events
from tests.support.llama_bench import Bench
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import DraftRequest
from trioserve.errors import DecodeError, KVCacheFullError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.drafter import PIECE_S, LlamaDrafter
from trioserve.models import BUNDLED
from trioserve.types import CacheRoot, SamplingParams

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
STORY = "Once upon a time"
#: The model is sure of every token of its answer, so rounding cannot change it.
COUNT = "<|im_start|>user\nCount from 1 to 20<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def backend() -> Iterator[LlamaBackend]:
    with made() as backend:
        yield backend


def made(**config: object) -> LlamaBackend:
    config = {"parallel": 3, "ctx_size": 3072, "spec_draft_n_max": 8} | config
    backend = llama.load(Config(threads=1, spec_draft_model=str(BUNDLED), **config))
    assert isinstance(backend, LlamaBackend)
    return backend


def drafter_of(backend: LlamaBackend) -> LlamaDrafter:
    (drafter,) = backend.drafters
    assert isinstance(drafter, LlamaDrafter)
    return drafter


class Asked:
    """A drafter, with a count of the tokens that its model has decoded."""

    def __init__(self, backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafter = drafter_of(backend)
        self.sizes: list[int] = []  # of the batches, since the last call
        self.fail: Exception | None = None
        self.piece = 400  # tokens that there is time to catch up with; 0: that is not known
        context: Any = self.drafter._context
        decode = context.decode

        def counted(batch: Any) -> None:
            self.sizes.append(len(batch))
            if self.fail is not None:
                raise self.fail
            decode(batch)

        monkeypatch.setattr(context, "decode", counted)

    def __call__(
        self, *texts: Sequence[int], n: int = 4, root: CacheRoot | None = None, first: int = 0
    ) -> list[list[int]]:
        self.sizes.clear()
        self.drafter._token_s = PIECE_S / self.piece if self.piece else 0.0
        drafts = self.drafter.propose(
            [DraftRequest(i, keys, root or CacheRoot(), n) for i, keys in enumerate(texts, first)]
        )
        self.drafter.check_integrity()
        return drafts


@pytest.fixture
def asked(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(backend, monkeypatch)


@pytest.fixture(scope="module")
def counting() -> list[int]:
    """A prompt, and what the model answers, in 60 tokens."""
    bench = Bench()
    bench.submit(1, COUNT, 60, sampling=ENDLESS)
    bench.run()
    keys = [*bench.backend.vocab.tokenize(COUNT), *bench.tokens[1]]
    bench.backend.close()
    return keys


def words(n: int, first: int = 300) -> list[int]:
    return [first + i % 97 for i in range(n)]


def test_it_guesses_what_its_model_would_say(asked: Asked, counting: list[int]) -> None:
    for start in (20, 25, 31):
        assert asked(counting[:start], n=5) == [counting[start : start + 5]]
    assert asked.sizes[0] == 6 - 4  # that of 5 guesses the last was not decoded
    assert asked.sizes[1:] == [1] * 4


def test_all_slots_are_in_one_batch(asked: Asked, counting: list[int]) -> None:
    texts = [counting[:12], counting[:20], counting[:31]]
    drafts = asked(*texts, n=3)
    assert drafts == [counting[len(text) : len(text) + 3] for text in texts]
    assert asked.sizes[1:] == [3, 3]


def test_wrong_guesses_are_taken_back(asked: Asked, counting: list[int]) -> None:
    asked(counting[:20], n=6)
    other = [*counting[:22], 400, 401]  # two guesses were right
    asked(other, n=2)
    assert asked.sizes == [2, 1]
    assert asked(counting[:23], n=3) == [counting[23:26]]


def test_a_draft_ends_before_what_is_improbable() -> None:
    bench = Bench()
    said = bench.alone(STORY, 30, sampling=ENDLESS)
    bench.submit(1, STORY, 30, sampling=ENDLESS, n_probs=1)
    probs = []
    while bench.engine.step():
        pass
    for event in take_events(bench.engine):
        probs += [math.exp(p.chosen.logprob) for p in getattr(event, "probs", ())]
    prompt = list(bench.backend.vocab.tokenize(STORY))
    bench.backend.close()
    with made(spec_draft_p_min=0.5, spec_draft_n_max=30) as backend:
        drafter = drafter_of(backend)
        lengths = set()
        for start in range(0, 24, 3):
            keys = [*prompt, *said.tokens[:start]]
            (draft,) = drafter.propose([DraftRequest(0, keys, CacheRoot(), 6)])
            expected = []
            for token, prob in zip(said.tokens[start:], probs[start:], strict=True):
                if prob < 0.5 or len(expected) == 6:
                    break
                expected.append(token)
            assert draft == expected
            lengths.add(len(draft))
    assert len(lengths) > 2


def test_a_draft_that_is_too_short_is_not_used(counting: list[int]) -> None:
    with made(spec_draft_n_min=3) as backend:
        drafter = drafter_of(backend)
        for n_max, n_made in ((2, 0), (3, 3)):
            (draft,) = drafter.propose([DraftRequest(0, counting[:20], CacheRoot(), n_max)])
            assert len(draft) == n_made


def test_a_long_prompt_is_taken_in_pieces_beside_others(asked: Asked, counting: list[int]) -> None:
    long = [*words(400), *counting[:20]]
    asked.piece = 100
    n_asked, drafts = 0, [[], []]
    while not drafts[1]:
        drafts = asked(counting[: 20 + n_asked], long, n=3)
        assert drafts[0] == counting[20 + n_asked : 23 + n_asked]
        assert asked.sizes[0] <= 100 + 20
        n_asked += 1
    assert n_asked == 5


@pytest.mark.parametrize(("piece", "size"), [(0, 32), (250, 250), (1, 17)])
def test_pieces_are_as_large_as_fits_into_their_time(asked: Asked, piece: int, size: int) -> None:
    asked.piece = piece
    assert asked(words(900)) == [[]]
    assert asked.sizes == [size]


def test_what_a_token_costs_is_learned_from_every_piece(asked: Asked) -> None:
    asked.piece = 1
    asked(words(900))
    assert 0 < asked.drafter._token_s < PIECE_S


def test_what_another_slot_has_is_copied(asked: Asked, counting: list[int]) -> None:
    text = [*words(40), *counting[:20]]
    (first,) = asked(text)
    (second,) = asked([*text, first[0]], first=1)
    assert asked.sizes[0] == 1
    assert second[:3] == first[1:]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "split"])
def test_a_copy_goes_on_as_its_source_does(
    monkeypatch: pytest.MonkeyPatch, counting: list[int], *, unified: bool
) -> None:
    with made(kv_unified=unified) as backend:
        asked = Asked(backend, monkeypatch)
        asked(counting[:40])
        assert asked(counting[:40], counting[:36], first=0) == [counting[40:44], counting[36:40]]
        assert asked.sizes[0] == 2


def test_nothing_is_copied_from_another_owner(asked: Asked, counting: list[int]) -> None:
    text = [*words(30), *counting[:20]]
    asked(text)
    asked(text, first=1, root=CacheRoot(owner="another"))
    assert asked.sizes[0] == len(text)
    asked(text, root=CacheRoot(owner="another"))  # in the slot of the first
    assert asked.sizes[0] == 1  # from the other slot of the same owner
    asked(text, root=CacheRoot(owner="a third"))
    assert asked.sizes[0] == len(text)


def test_the_next_text_of_a_slot_goes_on_where_it_parts(asked: Asked, counting: list[int]) -> None:
    asked(counting[:40])
    asked.drafter.forget(0)
    assert asked([*counting[:30], 500])[0]
    assert asked.sizes[0] == 1


def test_what_the_draft_model_does_not_know_gets_no_draft(
    asked: Asked, counting: list[int]
) -> None:
    n_vocab = asked.drafter._n_known
    assert asked([*counting[:20], n_vocab], counting[:20]) == [[], counting[20:24]]
    assert asked([*counting[:20], n_vocab, 5], counting[:20])[0] == []
    asked.drafter.forget(0)
    assert asked(counting[:20]) == [counting[20:24]]


def test_a_text_as_long_as_the_context_gets_no_draft(asked: Asked) -> None:
    limit = asked.drafter._rules.n_ctx_seq
    assert asked(words(limit)) == [[]]
    assert asked.sizes == []


def test_a_full_cache_costs_other_slots_what_they_hold(asked: Asked, counting: list[int]) -> None:
    asked(counting[:20], words(40))
    asked.fail = KVCacheFullError("full")
    assert asked(counting[:21]) == [[]]
    asked.fail = None
    assert [len(text.held) for text in asked.drafter._texts._all] == [
        20,
        0,
        0,
    ]  # cut for the decode
    assert asked(counting[:21]) == [counting[21:25]]


def test_where_there_are_no_others_the_longest_text_has_no_drafts_any_more(
    asked: Asked, counting: list[int]
) -> None:
    texts = [counting[:20], words(40)]
    asked(*texts)
    asked.fail = KVCacheFullError("full")
    assert asked(*texts) == [[], []]
    asked.fail = None
    assert asked(*texts) == [counting[20:24], []]
    asked.drafter.forget(1)
    assert asked(*texts)[1]


def test_a_cache_that_is_really_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(ctx_size=256, kv_unified=True) as backend:
        asked = Asked(backend, monkeypatch)
        asked.piece = 80
        texts = [words(200, 300), words(220, 350), words(150, 400)]
        for _ in range(6):
            drafts = asked(*texts)
    assert [bool(draft) for draft in drafts] == [False, False, True]


def test_a_draft_model_that_fails_is_not_asked_again(asked: Asked, counting: list[int]) -> None:
    asked.fail = DecodeError("broken")
    assert asked(counting[:20]) == [[]]
    asked.fail = None
    assert asked(counting[:20]) == [[]]
    assert asked.sizes == []
