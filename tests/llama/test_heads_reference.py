"""Drafts by heads beside llama-server's: the same guesses are made, and as many of them are right.

Runs where the variable LLAMA_SERVER names the binary:

    LLAMA_SERVER=/path/to/llama-server python -m pytest tests/llama/test_heads_reference.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.drafted import KINDS, Hand, load, write_head
from tests.support.llama_server import llama_server

pytestmark = pytest.mark.system

PROMPT = "One two three four five six"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_max", [1, 3, 6])
def test_as_many_guesses_are_right_as_in_llama_server(
    kind: str, n_max: int, tmp_path: Path
) -> None:
    good, n = write_head(tmp_path, kind, is_good=True), 64
    with load(good, parallel=1, spec_draft_n_max=n_max) as backend:
        hand = Hand(backend)
        prompt = backend.vocab.tokenize(PROMPT)
        (newest,) = hand.extend((0, prompt))
        said, n_drafted, n_right = [newest], 0, 0
        while len(said) < n:
            room = min(n_max, n - len(said) - 1)
            draft = hand.draft({0: newest}, room)[0] if room else []
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
    if good["swa_full"]:
        flags.append("--swa-full")
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
