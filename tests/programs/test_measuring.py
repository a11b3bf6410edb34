"""Programs that measure or check a server."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.programs.running import bin_of, calls_in, environment_of, run, served
from tests.programs.table import Works
from trioserve.testing import ScriptedProjector, ToolScript

pytestmark = pytest.mark.system

N_REQUESTS = 3

#: A tokenizer with a single token, in the form of Hugging Face: others would be downloaded.
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
}


def write_tokenizer(folder: Path) -> str:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(folder)


def write_prompts(path: Path, column: str) -> str:
    lines = (json.dumps({column: f"Say hello {i}."}) for i in range(N_REQUESTS))
    path.write_text("\n".join(lines))
    return str(path)


async def test_guidellm(tmp_path: Path, works: Works) -> None:
    program = bin_of("guidellm")
    prompts = write_prompts(tmp_path / "prompts.jsonl", "prompt")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    async with served(lambda prompt: "Hello.") as server:
        ended = await run(
            [str(program / "guidellm"), "run", "--disable-console-interactive",
             "--backend", f"kind=openai_http,target={server.url},model=scripted",
             "--profile", "kind=synchronous", "--data", f"kind=json_file,path={prompts}",
             "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
             "--constraint", f"kind=max_requests,count={N_REQUESTS}",
             "--output", "kind=json,path=report.json"],
            folder=tmp_path,
            environ=environment_of("guidellm", home=tmp_path, HF_HUB_OFFLINE="1"),
            patience=300,
        )  # fmt: skip
    assert ended.code == 0, ended.output
    assert [one.path for one in server.refused if one.path != "/metrics"] == []
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (N_REQUESTS, 0)
    works("guidellm", "measures chats")


@pytest.mark.parametrize("kind", ["chat", "completions", "responses", "messages"])
async def test_aiperf(kind: str, tmp_path: Path, works: Works) -> None:
    program = bin_of("aiperf")
    prompts = write_prompts(tmp_path / "prompts.jsonl", "text")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    async with served(lambda prompt: "Hello.") as server:
        ended = await run(
            [str(program / "aiperf"), "profile", "--model", "scripted", "--url", server.url,
             "--endpoint-type", kind, "--streaming", "--use-server-token-count",
             "--input-file", prompts, "--custom-dataset-type", "single-turn",
             "--request-count", str(N_REQUESTS), "--concurrency", "1",
             "--tokenizer", tokenizer, "--ui", "none", "--artifact-dir", "report"],
            folder=tmp_path,
            environ=environment_of("aiperf", home=tmp_path),
            patience=300,
        )  # fmt: skip
    assert ended.code == 0, ended.output
    assert [one.path for one in server.refused if one.path != "/metrics"] == []
    [report] = (tmp_path / "report").rglob("profile_export_aiperf.json")
    assert json.loads(report.read_text())["request_count"]["avg"] == N_REQUESTS
    works("aiperf", kind)


#: Checks that fail here: a server of one model does not need its name, and compacts nothing.
NOT_HERE = {
    "openai-chat": {"chat-error-handling"},
    "open-responses": {"error-handling"},
    "anthropic": set[str](),
}


@pytest.mark.parametrize("form", NOT_HERE)
async def test_llm_comply(form: str, tmp_path: Path, works: Works) -> None:
    program = bin_of("llm-comply")
    script = ToolScript(steps=[("get_weather", {"location": "Paris"})], aside="Hello.")
    async with served(script, projector=ScriptedProjector()) as server:
        ended = await run(
            [str(program / "llm-comply"), "--json", "--base-url", f"{server.url}/v1",
             "--api-key", "none", "--model", "scripted", "--format", form],
            folder=tmp_path,
            environ=environment_of("llm-comply", home=tmp_path),
        )  # fmt: skip
    results = json.loads(ended.output)["results"]
    failed = {one["id"] for one in results if one["status"] == "failed"}
    assert failed == NOT_HERE[form], ended.output
    passed = sum(one["status"] == "passed" for one in results)
    works("llm-comply", f"{form}: {passed} of {len(results)}")


#: Operations that change nothing, and that a model of text without more has.
SAFE = (
    "^/v1/(chat/completions|completions|messages(/count_tokens)?|responses(/input_tokens)?|models)$"
    "|^/(tokenize|detokenize|apply-template|health|completion|api/(chat|generate|tags|ps|version))$"
)
CHECKS = (
    "not_a_server_error",
    "content_type_conformance",
    "response_schema_conformance",
    "status_code_conformance",
)


#: Leaves out bodies that ask for a status of 500 or more: grammars that the script does not follow,
#: and deadlines, which may pass at once.
_HOOKS = """
import schemathesis

@schemathesis.hook
def filter_body(context, body):
    left_out = {"grammar", "json_schema", "response_format", "timeout"}
    return not isinstance(body, dict) or not left_out & {*body}
"""


async def test_schemathesis(tmp_path: Path, works: Works) -> None:
    program = bin_of("schemathesis")
    (tmp_path / "hooks.py").write_text(_HOOKS, encoding="utf-8")
    async with served(lambda prompt: "Hello.") as server:
        ended = await run(
            [str(program / "schemathesis"), "run", f"{server.url}/openapi.json",
             "--include-path-regex", SAFE, "--checks", ",".join(CHECKS), "--phases", "fuzzing",
             "--max-examples", "20", "--max-time", "40", "--seed", "1", "--no-color"],
            folder=tmp_path,
            environ={
                **environment_of("schemathesis", home=tmp_path),
                "PYTHONPATH": str(tmp_path),
                "SCHEMATHESIS_HOOKS": "hooks",
            },
        )  # fmt: skip
    assert ended.code == 0, ended.output
    assert [one for one in server.exchanges if one.status >= 500] == []
    answered = Counter(one.path for one in server.exchanges if one.status == 200)
    assert answered["/v1/completions"] and answered["/tokenize"], calls_in(server.exchanges)
    found = re.search(r"(\d+) generated", ended.output)
    assert found, ended.output
    works("schemathesis", "finds no violation of `/openapi.json`")
