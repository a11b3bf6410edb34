from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from unittest import mock

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import EngineError, InvalidRequestError
from trioserve.llama import sampler as sampler_module
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.sampler import Shortlist, largest, n_best
from trioserve.llama.sampler_chain import names_of
from trioserve.types import SAMPLER_NAMES, SamplingParams

PROMPT = "Once upon a time there was a small boat"
OFF = (
    "?penalties",
    "?dry",
    "?top-n-sigma",
    "top-k",
    "?typical",
    "top-p",
    "min-p",
    "?xtc",
    "temp-ext",
    "dist",
)


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    """A backend whose last batch is the prompt, with logits in the last row."""
    with llama.load(Config(threads=1, ctx_size=256, parallel=2)) as backend:
        row = backend.batch.extend(backend.vocab.tokenize(PROMPT), 0, 0)
        backend.batch.want_logits(row)
        backend.decode()
        yield backend


def last_row(backend: LlamaBackend) -> int:
    return len(backend.vocab.tokenize(PROMPT)) - 1


def draw(backend: LlamaBackend, count: int = 20, **fields: object) -> list[int]:
    """Draw from the same logits again and again."""
    with backend.sampler(SamplingParams(**fields), backend.vocab.tokenize(PROMPT)) as sampler:
        return [sampler.sample(last_row(backend)) for _ in range(count)]


def names(backend: LlamaBackend, **fields: object) -> tuple[str, ...]:
    with backend.sampler(SamplingParams(**fields), ()) as sampler:
        return names_of(sampler.handle)


# -- which samplers there are


def test_the_default_chain_has_the_order_of_llama_server(backend: LlamaBackend) -> None:
    assert names(backend) == OFF


@pytest.mark.parametrize(
    ("fields", "place", "name"),
    [
        ({"repeat_penalty": 1.1}, 0, "penalties"),
        ({"presence_penalty": 0.1}, 0, "penalties"),
        ({"frequency_penalty": -0.1}, 0, "penalties"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, 0, "?penalties"),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, 0, "penalties"),
        ({"dry_multiplier": 0.8}, 1, "dry"),
        ({"dry_multiplier": 0.8, "dry_base": 0.5}, 1, "?dry"),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, 1, "?dry"),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": -1}, 1, "dry"),
        ({"top_n_sigma": 1.0}, 2, "top-n-sigma"),
        ({"top_k": 0}, 3, "?top-k"),
        ({"typical_p": 0.9}, 4, "typical"),
        ({"top_p": 1.0}, 5, "?top-p"),
        ({"min_p": 0.0}, 6, "?min-p"),
        ({"xtc_probability": 0.5}, 7, "xtc"),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, 7, "?xtc"),
        ({"temperature": 1.0}, 8, "?temp-ext"),
        ({"temperature": 1.0, "dynatemp_range": 0.5}, 8, "temp-ext"),
    ],
)
def test_a_parameter_turns_its_sampler_on_or_off(
    backend: LlamaBackend, fields: dict[str, object], place: int, name: str
) -> None:
    expected = list(OFF)
    expected[place] = name
    assert names(backend, **fields) == tuple(expected)


def test_the_request_names_the_samplers_and_their_order(backend: LlamaBackend) -> None:
    chosen = names(backend, samplers=("temperature", "top_k", "infill", "top_k"))
    assert chosen == ("temp-ext", "top-k", "infill", "top-k", "dist")
    assert names(backend, samplers=()) == ("dist",)


def test_adaptive_p_draws_wherever_it_is_named(backend: LlamaBackend) -> None:
    fields = {"samplers": ("adaptive_p", "min_p"), "adaptive_target": 0.5}
    assert names(backend, **fields) == ("min-p", "adaptive-p")


@pytest.mark.parametrize(("version", "name"), [(1, "mirostat"), (2, "mirostat-v2")])
def test_mirostat_replaces_all_but_the_biases(
    backend: LlamaBackend, version: int, name: str
) -> None:
    fields = {"mirostat": version, "repeat_penalty": 1.5, "dry_multiplier": 1.0}
    assert names(backend, **fields) == ("temp", name)
    assert names(backend, **fields, ignore_eos=True) == ("logit-bias", "temp", name)


def test_biases_come_first(backend: LlamaBackend) -> None:
    assert names(backend, logit_bias=((5, 1.0),)) == ("logit-bias", *OFF)
    assert names(backend, ignore_eos=True) == ("logit-bias", *OFF)


# -- what they do


def test_a_seed_reproduces_and_another_does_not(backend: LlamaBackend) -> None:
    hot = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "count": 50}
    assert draw(backend, seed=7, **hot) == draw(backend, seed=7, **hot)
    assert draw(backend, seed=7, **hot) != draw(backend, seed=8, **hot)
    assert draw(backend, seed=-1, **hot) != draw(backend, seed=-1, **hot)


@pytest.mark.parametrize("temperature", [0, -1.0, 1e-40])
def test_no_temperature_takes_the_most_probable(backend: LlamaBackend, temperature: float) -> None:
    best = draw(backend, top_k=1, temperature=1.0)
    assert draw(backend, temperature=temperature) == best
    assert len(set(best)) == 1


def test_a_bias_decides(backend: LlamaBackend) -> None:
    assert set(draw(backend, logit_bias=((17, 1000.0),))) == {17}
    [best] = set(draw(backend, temperature=0))
    assert best not in draw(backend, temperature=0, logit_bias=((best, -math.inf),))


def test_ignore_eos_forbids_each_token_that_ends(backend: LlamaBackend) -> None:
    ends = backend.vocab.end_of_generation
    biases = tuple((token, 1000.0) for token in ends)
    assert set(draw(backend, logit_bias=biases)) <= ends
    assert not ends & set(draw(backend, logit_bias=biases, ignore_eos=True))


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"mirostat": 2}])
def test_an_output_has_as_many_tokens_as_it_must(
    backend: LlamaBackend, fields: dict[str, object]
) -> None:
    ends = backend.vocab.end_of_generation
    params = SamplingParams(logit_bias=[(each, 1000.0) for each in ends], min_tokens=5, **fields)
    row = last_row(backend)
    with backend.sampler(params, backend.vocab.tokenize(PROMPT)) as sampler:
        drawn = [sampler.sample(row)]
        sampler.accept(drawn[0])  # as a token that is forced
        drawn += [sampler.sample_with_probs(row, 1, post=post)[0] for post in (False, True)]
        drawn += [sampler.sample(row), sampler.sample(row)]
    assert not ends & set(drawn[:-1])
    assert drawn[-1] in ends


def test_penalties_look_back_at_the_prompt(backend: LlamaBackend) -> None:
    prompt = backend.vocab.tokenize(PROMPT)
    one_more = ((prompt[0], 100.0),)  # without a penalty the first token of the prompt is chosen
    greedy = {"temperature": 0, "logit_bias": one_more, "count": 1}
    assert draw(backend, **greedy) == [prompt[0]]
    assert draw(backend, **greedy, presence_penalty=1000.0) != [prompt[0]]
    assert draw(backend, **greedy, presence_penalty=1000.0, repeat_last_n=-1) != [prompt[0]]
    assert draw(backend, **greedy, presence_penalty=1000.0, repeat_last_n=2) == [prompt[0]]


def test_dry_breaks_a_repetition(backend: LlamaBackend) -> None:
    a, b, c = 300, 301, 302
    params = {"temperature": 0, "logit_bias": ((c, 100.0),)}
    for multiplier, expected in ((0.0, True), (1000.0, False)):
        fields = SamplingParams(dry_multiplier=multiplier, **params)
        with backend.sampler(fields, (a, b, c, a, b, c, a, b)) as sampler:
            assert (sampler.sample(last_row(backend)) == c) is expected


# -- probabilities


def test_raw_probabilities_are_a_softmax_of_the_logits(backend: LlamaBackend) -> None:
    with backend.sampler(SamplingParams(temperature=0), ()) as sampler:
        token, probs = sampler.sample_with_probs(last_row(backend), 10**9, post=False)
    assert len(probs.top) == backend.vocab.n_tokens
    assert probs.chosen == probs.top[0]
    assert probs.chosen.id == token
    assert probs.chosen.piece == backend.vocab.pieces[token]
    assert sum(math.exp(one.logprob) for one in probs.top) == pytest.approx(1.0)
    logprobs = [one.logprob for one in probs.top]
    assert logprobs == sorted(logprobs, reverse=True)
    assert {one.id for one in probs.top} == set(range(backend.vocab.n_tokens))


def test_probabilities_after_the_samplers_are_of_what_these_left(backend: LlamaBackend) -> None:
    params = SamplingParams(top_k=4, top_p=1.0, min_p=0.0, seed=3)
    with backend.sampler(params, ()) as sampler:
        _, probs = sampler.sample_with_probs(last_row(backend), 50, post=True)
    assert len(probs.top) == 4
    assert sum(math.exp(one.logprob) for one in probs.top) == pytest.approx(1.0, abs=1e-5)
    assert probs.chosen in probs.top
    with backend.sampler(SamplingParams(temperature=0), ()) as sampler:
        token, probs = sampler.sample_with_probs(last_row(backend), 50, post=True)
    assert [(one.id, one.logprob) for one in probs.top] == [(token, 0.0)]


@pytest.mark.parametrize("extra", [{}, {"xtc_probability": 1.0, "xtc_threshold": 0.01}])
def test_asking_for_probabilities_does_not_change_the_choice(
    backend: LlamaBackend, extra: dict[str, float]
) -> None:
    params = SamplingParams(seed=11, temperature=2.0, repeat_penalty=1.3, **extra)
    row, runs = last_row(backend), []
    for post in (None, False, True):
        with backend.sampler(params, ()) as sampler:
            runs.append(
                [
                    sampler.sample(row)
                    if post is None
                    else sampler.sample_with_probs(row, 3, post=post)[0]
                    for _ in range(30)
                ]
            )
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("post", [False, True])
def test_no_candidates_are_fine(backend: LlamaBackend, post: bool) -> None:
    with backend.sampler(SamplingParams(), ()) as sampler:
        token, probs = sampler.sample_with_probs(last_row(backend), 0, post=post)
    assert (probs.top, probs.chosen.id) == ((), token)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3]), max_size=12), st.integers(0, 15))
def test_the_largest_are_in_order_and_ties_as_they_stand(values: list[float], n: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:n]
    assert largest(np.array(values), n) == expected


# -- bad values


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"temperature": 1e300}, "temperature"),
        ({"presence_penalty": -1e39}, "presence_penalty"),
        ({"logit_bias": ((10**6, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((1, math.inf),)}, "logit_bias"),
        ({"logit_bias": ((1, 1e300),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0),) * 3000}, "logit_bias"),
        ({"samplers": ("top_k",) * 33}, "samplers"),
        ({"samplers": ("infill",)}, "samplers"),
        ({"samplers": ("top_k", "infill"), "top_k": 2000}, "samplers"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ("",)}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ("a\0b",)}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ("\ud800",)}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ("a" * 41,)}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ("a",) * 33}, "dry_sequence_breakers"),
    ],
)
def test_a_bad_value_is_refused_by_name(
    backend: LlamaBackend, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        backend.sampler(SamplingParams(**fields), ())
    assert caught.value.param == param
    with pytest.raises(InvalidRequestError):
        backend.check_sampling(SamplingParams(**fields))


def test_what_has_no_effect_is_not_refused(backend: LlamaBackend) -> None:
    backend.check_sampling(SamplingParams(dry_sequence_breakers=("",)))
    backend.check_sampling(SamplingParams(samplers=("infill",), mirostat=2))


def test_windows_are_bounded_by_the_context(backend: LlamaBackend) -> None:
    huge = 2**31 - 1  # llama.cpp would allocate 8 GiB for each
    fields = {"repeat_last_n": huge, "dry_penalty_last_n": huge, "dry_multiplier": 1.0}
    assert len(draw(backend, **fields, repeat_penalty=1.1)) == 20


@pytest.mark.parametrize("row", [-1, 0, 1000])
def test_a_row_without_logits_is_refused(backend: LlamaBackend, row: int) -> None:
    with backend.sampler(SamplingParams(), ()) as sampler:
        with pytest.raises(EngineError, match=f"Row {row} of the last batch has no logits"):
            sampler.sample(row)
        with pytest.raises(EngineError):
            sampler.sample_with_probs(row, 1, post=True)


def test_a_closed_sampler_is_refused(backend: LlamaBackend) -> None:
    sampler = backend.sampler(SamplingParams(), ())
    sampler.close()
    sampler.close()
    with pytest.raises(EngineError, match="closed"):
        sampler.sample(last_row(backend))
    with pytest.raises(EngineError, match="closed"):
        sampler.sample_with_probs(last_row(backend), 1, post=False)


# -- nothing aborts

_REALS = st.sampled_from(
    [0.0, 1e-38, 1e-30, 0.01, 0.2, 0.5, 0.99, 1.0, 1.5, 100.0, 1e30, 3.4e38, 1e300]
)
_SIGNED = st.builds(lambda x, sign: x * sign, _REALS, st.sampled_from([1, -1]))
_COUNTS = st.sampled_from([0, 1, 2, 5, 128, 129, 1000, 2**31 - 1])
_BACK = st.sampled_from([-1, 0, 1, 3, 64, 2**31 - 1])
_TOKENS = st.integers(0, 2000)
_BIAS = st.one_of(_SIGNED, st.just(-math.inf))

_FIELDS: dict[str, st.SearchStrategy[object]] = {
    "seed": st.sampled_from([-1, 0, 1, 2**32 - 1]),
    "temperature": _SIGNED,
    "dynatemp_range": _REALS,
    "dynatemp_exponent": _REALS,
    "top_k": st.sampled_from([-1, 0, 1, 2, 40, 128, 129, 2000, 2**31 - 1]),
    "top_p": _REALS,
    "min_p": _REALS,
    "typical_p": _REALS,
    "top_n_sigma": _SIGNED,
    "xtc_probability": _REALS,
    "xtc_threshold": _REALS,
    "min_keep": _COUNTS,
    "min_tokens": _COUNTS,
    "repeat_last_n": _BACK,
    "repeat_penalty": _REALS,
    "presence_penalty": _SIGNED,
    "frequency_penalty": _SIGNED,
    "dry_multiplier": _REALS,
    "dry_base": _REALS,
    "dry_allowed_length": _BACK,
    "dry_penalty_last_n": _BACK,
    "dry_sequence_breakers": st.lists(st.text(max_size=12), max_size=4).map(tuple),
    "mirostat": st.sampled_from([0, 0, 0, 1, 2]),
    "mirostat_tau": _REALS,
    "mirostat_eta": _REALS,
    "adaptive_target": st.sampled_from([-1.0, 0.0, 0.3, 1.0]),
    "adaptive_decay": st.sampled_from([0.0, 0.5, 0.99]),
    "samplers": st.lists(st.sampled_from(sorted(SAMPLER_NAMES)), max_size=len(SAMPLER_NAMES)).map(
        tuple
    ),
    "ignore_eos": st.booleans(),
    "logit_bias": st.one_of(
        st.lists(st.tuples(_TOKENS, _BIAS), max_size=4).map(tuple),
        _BIAS.map(lambda bias: tuple((token, bias) for token in range(2048))),
    ),
}


assert set(_FIELDS) == {field.name for field in attrs.fields(SamplingParams)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    fields=st.fixed_dictionaries({}, optional=_FIELDS),
    prompt=st.lists(_TOKENS, max_size=8),
    post=st.booleans(),
)
def test_extreme_values_are_refused_or_give_tokens(
    backend: LlamaBackend, fields: dict[str, object], prompt: list[int], post: bool
) -> None:
    sampler, refused = None, None
    try:
        sampler = backend.sampler(SamplingParams(**fields), tuple(prompt))
    except InvalidRequestError as error:
        refused = error.param
    if sampler is None:
        assert refused in fields
        return
    ids = range(backend.vocab.n_tokens)
    with sampler:
        for _ in range(3):
            assert sampler.sample(last_row(backend)) in ids
            token, probs = sampler.sample_with_probs(last_row(backend), 3, post=post)
            assert token in ids
            logprobs = [one.logprob for one in probs.top]
            assert not any(math.isnan(logprob) for logprob in logprobs)
            assert all(a >= b for a, b in itertools.pairwise(logprobs))


# -- the shortlist


@pytest.mark.parametrize(
    ("changes", "n"),
    [
        ({}, 40),
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.0, "dynatemp_range": 0.5}, 40),
        ({"temperature": 0.0, "top_k": 0}, 1),
        ({"top_k": 0}, 0),
        ({"mirostat": 2}, 0),
        ({"repeat_penalty": 1.1}, 0),
        ({"dry_multiplier": 0.8}, 0),
        ({"top_n_sigma": 1.0}, 0),
        ({"typical_p": 0.9}, 40),
        ({"typical_p": 0.9, "temperature": 0.0}, 40),
        ({"samplers": ("top_p", "top_k", "temperature")}, 0),
        ({"samplers": ("top_p", "top_k", "temperature"), "temperature": 0.0}, 1),
        ({"samplers": ("min_p", "top_k")}, 40),
        ({"samplers": ("xtc", "top_k"), "xtc_probability": 0.5}, 0),
        ({"samplers": ()}, 0),
    ],
)
def test_how_many_tokens_a_chain_has_to_look_at(changes: dict[str, object], n: int) -> None:
    assert n_best(SamplingParams(**changes)) == n


@settings(max_examples=50)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=64, max_size=300),
    top_k=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 0.8]),
    biases=st.dictionaries(st.integers(0, 63), st.sampled_from([-1.0, -100.0, -math.inf])),
    allowed=st.none() | st.sets(st.integers(0, 63), min_size=1),
)
def test_the_shortlist_leaves_none_of_the_best_out(
    logits: list[float],
    top_k: int,
    temperature: float,
    biases: dict[int, float],
    allowed: set[int] | None,
) -> None:
    array = np.array(logits, dtype=np.float32)
    biased = array.copy()
    for token, bias in biases.items():
        biased[token] += bias
    ids = None if allowed is None else np.array(sorted(allowed), dtype=np.int32)
    if ids is not None:
        array, biased = array[ids], biased[ids]
    params = SamplingParams(top_k=top_k, temperature=temperature)
    with mock.patch.multiple(sampler_module, _MIN_VOCAB=0, _BLOCK=4):
        places = Shortlist(params, biases, len(logits)).places(array, ids)
    if places is None:
        return
    n = min(1 if temperature == 0 else top_k, len(array))
    rest = np.setdiff1d(np.arange(len(array)), places)
    assert (biased[rest] <= np.sort(biased)[-n]).all()
    assert len(places) >= n


def test_logits_that_are_no_numbers_have_no_shortlist() -> None:
    with mock.patch.multiple(sampler_module, _MIN_VOCAB=0, _BLOCK=4):
        for params in (SamplingParams(top_k=2), SamplingParams(temperature=0)):
            listed = Shortlist(params, {}, 256)
            assert listed.is_useful
            assert listed.places(np.full(256, np.nan, dtype=np.float32)) is None


@pytest.mark.parametrize(
    ("changes", "ignore_eos"),
    [({"top_k": 3}, True), ({"temperature": 0.0}, True), ({"top_k": 5, "min_p": 0}, False)],
)
def test_the_shortlist_changes_no_choice(
    backend: LlamaBackend, changes: dict[str, object], ignore_eos: bool
) -> None:
    fields: dict[str, object] = {"seed": 7, "ignore_eos": ignore_eos, **changes}
    with mock.patch.multiple(sampler_module, _MIN_VOCAB=10**9):
        without = draw(backend, **{**fields, "min_p": 0.0})
    with mock.patch.multiple(sampler_module, _MIN_VOCAB=0):
        assert draw(backend, **{**fields, "min_p": 0.0}) == without
