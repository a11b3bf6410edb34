"""lm-eval: evaluations of a model, by what it writes and by how probable choices are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs.running import bin_of, calls_in, environment_of, run, served
from tests.programs.table import Works
from tests.support.http_server import serving
from tests.support.plain_loop import EXACT, PlainLoop, plain_loop
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.models import BUNDLED

pytestmark = pytest.mark.system

ANSWER = "The sum is 42."


@pytest.mark.parametrize(
    ("kind", "path", "flags"),
    [
        ("local-chat-completions", "/v1/chat/completions", ["--apply_chat_template"]),
        ("local-completions", "/v1/completions", []),
    ],
)
async def test_lm_eval(
    kind: str, path: str, flags: list[str], tmp_path: Path, works: Works
) -> None:
    data = tmp_path / "sums.json"
    data.write_text(json.dumps({"question": "Add the numbers.", "answer": ANSWER}))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 50},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))  # JSON is YAML, too
    program = bin_of("lm-eval")
    async with served(lambda prompt: f"{ANSWER}\nMore.") as server:
        options = "tokenizer_backend=None,tokenized_requests=False"
        model = f"model=scripted,base_url={server.url}{path},{options}"
        ended = await run(
            [str(program / "lm_eval"), "--model", kind, "--model_args", model, "--tasks", "sums",
             "--include_path", ".", *flags],
            folder=tmp_path,
            environ=environment_of("lm-eval", home=tmp_path, HF_HUB_OFFLINE="1"),
        )  # fmt: skip
    assert ended.code == 0, ended.output
    assert server.refused == [], calls_in(server.exchanges)
    [row] = [line for line in ended.output.splitlines() if line.startswith("|sums")]
    assert [cell.strip() for cell in row.split("|")][7] == "1"
    works("lm-eval", kind)


#: Questions with choices, and the number of the right one.
QUESTIONS = [
    ("Once upon a time, there was a little girl named Lily. She had a pet", 0),
    ("The dog ran to the park. He wanted to", 1),
    ("It was raining, so Tim took his", 2),
    ("Mom said that it was time to go to", 3),
    ("Sara and Ben saw a bird in the tree. The bird was", 1),
    ("The sky is", 0),
]
CHOICES = ["cat.", "play with his friends.", "red umbrella, and went out.", "bed"]


def scores_of(loop: PlainLoop, context: str, choice: str) -> float:
    """The log probability of a choice after its context, as lm-eval divides the tokens."""
    n_context = len(loop.tokenize(context, add_special=False))
    return sum(
        loop.scores(loop.tokenize(f"{context} {choice}", add_special=False))[n_context - 1 :]
    )


async def test_the_choices_have_the_scores_that_llama_cpp_gives_them(
    tmp_path: Path, works: Works
) -> None:
    data = tmp_path / "choices.json"
    rows = [{"question": text, "choices": CHOICES, "answer": n} for text, n in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "output_type": "multiple_choice",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "choices.yaml").write_text(json.dumps(task))
    program = bin_of("lm-eval")
    app = create_app(Config(threads=1, **EXACT))
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        options = "tokenizer_backend=remote,num_concurrent=4"
        model = f"model=any,base_url={url}/v1/completions,{options}"
        ended = await run(
            [str(program / "lm_eval"), "--model", "local-completions", "--model_args", model,
             "--tasks", "choices", "--include_path", ".", "--log_samples", "--output_path", "out"],
            folder=tmp_path,
            environ=environment_of("lm-eval", home=tmp_path, HF_HUB_OFFLINE="1"),
        )  # fmt: skip
    assert ended.code == 0, ended.output
    [samples] = (tmp_path / "out").rglob("samples_choices_*.jsonl")
    logged = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(logged) == len(QUESTIONS)
    n_right = 0
    with plain_loop(BUNDLED, exact=True) as loop:
        for sample in logged:
            doc = sample["doc"]
            expected = [scores_of(loop, doc["question"], choice) for choice in CHOICES]
            found = [float(score) for score, _is_greedy in sample["filtered_resps"]]
            assert found == pytest.approx(expected, abs=1e-2)
            n_right += expected.index(max(expected)) == doc["answer"]
    assert n_right > 0, "a test at chance level says nothing"
    [row] = [line for line in ended.output.splitlines() if line.startswith("|choices")]
    measured = float(row.split("|")[7])
    assert measured == pytest.approx(n_right / len(QUESTIONS), abs=1e-3)
    works("lm-eval", "multiple choice")
