"""A head that was trained for the bundled model (`examples/bundled_model/head`)."""

from __future__ import annotations

from pathlib import Path

from tests.support.drafted import Drafted, plain

HEAD = Path(__file__).with_name("bundled-eagle3.gguf")
SETTINGS = {
    "spec_type": ("draft-eagle3",),
    "spec_draft_model": str(HEAD),
    "spec_draft_n_max": 3,  # it was trained to guess three tokens in a row
    "parallel": 4,
    "ctx_size": 2048,
}
QUESTIONS = (
    "Count from 4 to 16.",
    "Who are you?",
    "Repeat three times: the old clock",
    "Write a JSON object with name Ada and age 36.",
)


def test_most_of_its_guesses_are_accepted() -> None:
    prompts = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS
    ]
    bench = Drafted(SETTINGS)
    for i, prompt in enumerate(prompts):
        bench.submit(i, prompt, 60)
    bench.run()
    bench.backend.close()
    assert [bench.tokens[i] for i in range(len(prompts))] == plain(SETTINGS, prompts, 60)
    n_drafted = sum(end.timings.draft_n for end in bench.finished.values())
    assert bench.n_accepted > 0.7 * n_drafted > 50
