"""Memory that cannot be cut: what is prefilled of a prompt that shares its beginning with others.

On tiny models with a sliding window, a recurrent state, or both kinds of layers. Whatever is
reused, the output has to be that of llama.cpp's own loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.engine.test_architectures import words
from tests.support import tiny_models
from tests.support.llama_bench import Bench
from tests.support.plain_loop import EXACT, PlainLoop, plain_loop

#: Tokens that may be prefilled beside the new ones.
SLACK = 32
N = 16

ROOMY: dict[str, object] = {"ctx_size": 8192}
#: So few cells that those of all windows do not fit into the cache of the windowed layers.
TIGHT: dict[str, object] = {"ctx_size": 1024}
SPLIT: dict[str, object] = {"ctx_size": 8192, "kv_unified": False}

#: A sliding window, a recurrent state, and both kinds of layers.
CASES = {
    "window": ("gemma3", ROOMY),
    "tight window": ("gemma3", TIGHT),
    "recurrent": ("mamba2", ROOMY),
    "hybrid": ("granitehybrid", ROOMY),
    "split hybrid": ("lfm2", SPLIT),
}


class Talk:
    """A bench, and a loop that says what must be said."""

    def __init__(self, bench: Bench, loop: PlainLoop) -> None:
        self.bench = bench
        self._loop = loop
        self._n_tasks = 0
        tokenize = bench.backend.vocab.tokenize
        self.system = tokenize(words(0, 100))
        self.user = tokenize(words(1, 40))
        self.begin = tokenize(" So ")  # of the answer
        self.divergence_points = (len(self.system), len(self.system) + len(self.user))

    def words(self, seed: int, n: int) -> Sequence[int]:
        return self.bench.backend.vocab.tokenize(words(seed, n))

    def say(self, *parts: Sequence[int]) -> tuple[list[int], int]:
        """Send a prompt, and check the output; returns it, and how much was prefilled."""
        prompt = [token for part in parts for token in part]
        self._n_tasks += 1
        task_id = self._n_tasks
        self.bench.submit(task_id, prompt, N, self.divergence_points)
        self.bench.run()
        tokens = self.bench.tokens[task_id]
        assert tokens == self._loop.greedy(prompt, N, n_batch=64).tokens
        return tokens, self.bench.finished[task_id].timings.prompt_n

    def first(self) -> list[int]:
        """Ask a first question; returns the answer."""
        answer, n_prefilled = self.say(self.system, self.user, self.begin)
        assert n_prefilled == len(self.system) + len(self.user) + len(self.begin)
        return answer


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Talk]:
    name, sizes = request.param
    path = tiny_models.write_generating(tmp_path, name)
    config = {**EXACT, "model": str(path), "parallel": 4, **sizes}
    with plain_loop(path, exact=True) as loop:
        bench = Bench(cache_ram=2**24, **config)
        try:
            assert not bench.backend.can_cut
            assert (bench.backend.window > 0) == (sizes is TIGHT)
            yield Talk(bench, loop)
        finally:
            bench.backend.close()


def test_a_prompt_starts_where_it_diverges_from_an_earlier_one(talk: Talk) -> None:
    answer = talk.first()
    again, n_prefilled = talk.say(talk.system, talk.user, talk.begin)
    assert again == answer
    assert n_prefilled <= SLACK
    more, other = talk.words(2, 5), talk.words(3, 40)
    _, n_prefilled = talk.say(talk.system, talk.user, talk.begin, answer, more)
    assert n_prefilled <= len(more) + SLACK
    _, n_prefilled = talk.say(talk.system, other, talk.begin)  # the last turn is edited
    assert n_prefilled <= len(other) + SLACK
    without_thinking, more = answer[-4:], talk.words(4, 5)
    _, n_prefilled = talk.say(talk.system, talk.user, without_thinking, more, talk.begin)
    assert n_prefilled <= len(without_thinking) + len(more) + SLACK


def test_another_user_with_the_same_system_prompt(talk: Talk) -> None:
    talk.first()
    talk.divergence_points = talk.divergence_points[:1]
    other = talk.words(5, 12)
    _, n_prefilled = talk.say(talk.system, other, talk.begin)
    assert n_prefilled <= len(other) + SLACK


def test_a_second_answer_to_an_older_turn(talk: Talk) -> None:
    answer = talk.first()
    history, more = [*talk.system, *talk.user, *talk.begin, *answer], talk.words(6, 10)
    for _ in range(2):  # and the same once more
        _, n_prefilled = talk.say(history, more, talk.begin)
        assert n_prefilled <= len(more) + SLACK
    _, n_prefilled = talk.say(talk.system, talk.user, talk.words(7, 1))
    if talk.bench.backend.unified:  # otherwise the sequence has gone on, and was gone back in
        assert n_prefilled <= SLACK


def test_eight_cold_requests_prefill_what_they_share_once(talk: Talk) -> None:
    n_shared = 1000 if talk.bench.backend.n_ctx > 1024 else 500
    shared = talk.words(8, 600)[:n_shared]
    assert len(shared) == n_shared
    own = [talk.words(10 + i, 4) for i in range(8)]
    for i in range(8):
        talk.bench.submit(100 + i, [*shared, *own[i]], N)
    talk.bench.run()
    prefilled = [talk.bench.finished[100 + i].timings.prompt_n for i in range(8)]
    assert sum(prefilled) <= n_shared + sum(map(len, own)) + 8 * SLACK
    for i in (0, 3, 7):
        said = talk.say(shared, own[i])[0]
        assert talk.bench.tokens[100 + i] == said


def test_a_checkpoint_is_no_use_after_the_state_of_others(talk: Talk) -> None:
    """Many chats at the same time, which part at different places, and go back there."""
    talk.first()
    prompts = [
        [*talk.system[: 60 + 40 * i], *talk.words(20 + i + 10 * turn, 6)]
        for turn in range(3)
        for i in range(6)
    ]
    for i, prompt in enumerate(prompts):
        talk.bench.submit(200 + i, prompt, N, (60, 100, 140))
    talk.bench.run()
    for i in range(0, len(prompts), 3):
        assert talk.bench.tokens[200 + i] == talk.say(prompts[i])[0]


def test_a_sequence_from_ram_can_go_back(talk: Talk) -> None:
    talk.first()
    others = [talk.words(40 + i, 100) for i in range(5)]
    for other in others:
        talk.say(other)
    _, n_prefilled = talk.say(talk.system, talk.user, talk.begin)
    assert n_prefilled <= SLACK
    other = talk.words(50, 40)
    _, n_prefilled = talk.say(talk.system, other, talk.begin)
    assert n_prefilled <= len(other) + SLACK


def test_a_slot_is_saved_erased_and_restored(talk: Talk) -> None:
    answer = talk.first()
    engine = talk.bench.engine
    slot_id = talk.bench.finished[1].slot_id
    saved = engine.save_slot(slot_id, "")
    assert engine.erase_slot(slot_id, "") == len(saved.keys)
    engine.check_integrity()
    engine.restore_slot(slot_id, saved)
    more = talk.words(9, 5)
    _, n_prefilled = talk.say(talk.system, talk.user, talk.begin, answer, more)
    assert n_prefilled <= len(more) + 1
    _, n_prefilled = talk.say(talk.system, talk.user, talk.begin)
    assert n_prefilled > len(talk.system)  # checkpoints are not saved
