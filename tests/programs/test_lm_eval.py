"""lm-eval: an evaluation of the model, over chat completions and completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs.running import bin_of, calls_in, environment_of, run, served
from tests.programs.table import Works

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
