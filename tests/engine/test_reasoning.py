"""Reasoning in the engine: budgets, forced tokens, visible control tokens; scripted."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.support.engine_harness import Harness
from tests.support.scripts import NamedVocab
from trioserve.testing import ScriptedBackend
from trioserve.types import (
    Chunk,
    FinishReason,
    GenerationParams,
    Grammar,
    Prompt,
    Task,
    Thinking,
    ThinkingBudget,
)

THINK = Thinking(start="<t>", end="</t>")
BEGUN = attrs.evolve(THINK, begun=True)


def saying(text: str, **settings: Any) -> Harness:
    return Harness(ScriptedBackend(lambda _: text, **settings))


def submit(
    harness: Harness,
    n_tokens: int = -1,
    *,
    task_id: int = 1,
    thinking: Thinking = BEGUN,
    message: str = "",
    prompt: str = "Hi",
    **options: Any,
) -> None:
    closing = tuple((message + thinking.end).encode())
    budget = ThinkingBudget(thinking=thinking, n_tokens=n_tokens, closing=closing)
    grammar = options.get("grammar")
    harness.engine.submit(
        Task(
            task_id,
            Prompt(prompt.encode()),
            GenerationParams(**options),
            constraint=harness.backend.compile(grammar) if grammar else None,
            budget=budget,
        )
    )


@pytest.mark.parametrize(
    ("n_tokens", "text"),
    [
        (-1, "abcd</t>e"),
        (0, "</t>abcd</t>e"),
        (1, "a</t>bcd</t>e"),
        (3, "abc</t>d</t>e"),
        (7, "abcd</t></t>e"),  # its own end is cut, and not yet complete
        (8, "abcd</t>e"),
    ],
)
def test_reasoning_ends_when_its_budget_is_used_up(n_tokens: int, text: str) -> None:
    harness = saying("abcd</t>e")
    submit(harness, n_tokens)
    harness.run()
    wanted = text if n_tokens != 7 else "abcd</t</t>>e"
    assert harness.text(1) == wanted
    finish = harness.finish(1)
    assert finish.reason is FinishReason.EOS
    assert finish.timings.predicted_n == len(wanted) + 1


def test_the_budget_begins_with_the_marker_in_the_output() -> None:
    harness = saying("\n<t>abcd</t>e")
    submit(harness, 2, thinking=THINK)
    harness.run()
    assert harness.text(1) == "\n<t>ab</t>cd</t>e"


def test_an_output_without_reasoning_has_no_budget() -> None:
    harness = saying("abcd <t>efgh</t>")
    submit(harness, 0, thinking=THINK)
    harness.run()
    assert harness.text(1) == "abcd <t>efgh</t>"


def test_last_words_come_before_the_end() -> None:
    harness = saying("abcd")
    submit(harness, 2, message=" stop. ")
    harness.run()
    assert harness.text(1) == "ab stop. </t>cd"


def test_forced_tokens_count_like_others() -> None:
    harness = saying("abcd")
    submit(harness, 1, max_tokens=3)
    harness.run()
    assert harness.text(1) == "a</"
    assert harness.finish(1).reason is FinishReason.LIMIT
    harness = saying("abcd")
    submit(harness, 1, stop=("t>",))
    harness.run()
    assert harness.text(1) == "a</"
    assert harness.finish(1).stopping_word == "t>"


def test_forced_tokens_have_probabilities() -> None:
    harness = saying("ab")
    submit(harness, 1, n_probs=1)
    harness.run()
    chunks = [event for event in harness.events[1] if isinstance(event, Chunk)]
    probs = [each for chunk in chunks for each in chunk.probs]
    assert bytes(each.chosen.id for each in probs[:-1]) == b"a</t>b"


def test_it_is_ended_from_outside() -> None:
    harness = saying("abcdefghij")
    submit(harness, -1)
    while len(harness.text(1)) < 3:
        harness.step()
    before = harness.text(1)
    ended: list[bool] = []
    harness.engine.call(lambda: ended.append(harness.engine.end_thinking(1)))
    harness.run()
    assert ended == [True]
    assert harness.text(1) == before + "</t>" + "abcdefghij"[len(before) :]
    assert not harness.engine.end_thinking(1)  # it is gone


def test_end_thinking_does_nothing_outside_of_reasoning() -> None:
    harness = saying("abc")
    submit(harness, -1, thinking=THINK)
    harness.step()
    harness.step()
    assert harness.engine.end_thinking(1)
    harness.run()
    assert harness.text(1) == "abc"
    harness = saying("abc")
    harness.submit(1, "Hi")
    harness.step()
    assert not harness.engine.end_thinking(1)  # it has no budget


def test_the_grammar_begins_after_it() -> None:
    grammar = Grammar("json_object", thinking=BEGUN)
    harness = saying('{} is it</t>\n{"a": 1}')
    submit(harness, -1, grammar=grammar)
    harness.run()
    assert harness.finish(1).reason is FinishReason.EOS


# -- control tokens


def with_control_token(visible: bool, **options: Any) -> Harness:
    backend = ScriptedBackend(lambda _: "aZb")
    backend.vocab = NamedVocab(backend)  # type: ignore[assignment]
    harness = Harness(backend)
    tokens = frozenset({ord("Z")}) if visible else frozenset()
    harness.engine.submit(
        Task(1, Prompt(b"Hi"), GenerationParams(**options), preserved_tokens=tokens)
    )
    harness.run()
    return harness


def test_a_visible_control_token_is_text() -> None:
    assert with_control_token(False).text(1) == "ab"
    harness = with_control_token(True)
    assert harness.text(1) == "a[CALL]b"
    assert harness.finish(1).reason is FinishReason.EOS


def test_a_visible_control_token_can_stop() -> None:
    harness = with_control_token(True, stop=("[CALL]",))
    assert harness.text(1) == "a"
    assert harness.finish(1).stopping_word == "[CALL]"


def test_its_name_is_in_the_probabilities() -> None:
    harness = with_control_token(True, n_probs=1)
    probs = [p for event in harness.events[1] if isinstance(event, Chunk) for p in event.probs]
    assert probs[1].chosen.piece == probs[1].top[0].piece == b"[CALL]"
