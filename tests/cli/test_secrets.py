"""Secrets of the command line, as other processes see them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import serving
from tests.support.processes import all_processes, parent_of, words

CODE = """
import os, subprocess, sys
from trioserve.cli.secrets import hide_secrets
hide_secrets()
print(open("/proc/self/cmdline").read().split("\\0")[3:-1])
print([one for one in open("/proc/self/environ").read().split("\\0") if "KEY=" in one])
print(sys.argv[1:], subprocess.check_output(["printenv", "LLAMA_API_KEY"], text=True).strip())
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_other_processes_do_not_see_them() -> None:
    argv = ["--api-key", "topsecret", "--port", "e", "--hf_token=abc", "--api-key", "", "-hft", "e"]
    argv += ["--mcp-servers-json", "{}"]
    output = subprocess.check_output(
        [sys.executable, "-c", CODE, *argv],
        text=True,
        env={**os.environ, "LLAMA_API_KEY": "hush", "OTHER_KEY": "hush"},
    )
    line, variables, kept = output.splitlines()
    shown = ["--api-key", "*********", "--port", "e", "--hf_token=***", "--api-key", "", "-hft"]
    assert line == str([*shown, "*", "--mcp-servers-json", "**"])
    assert sorted(ast.literal_eval(variables)) == ["LLAMA_API_KEY=****", "OTHER_KEY=hush"]
    assert kept == f"{argv} hush"


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
async def test_the_key_of_an_upstream_is_in_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = "[upstream.{}]\nurl = http://127.0.0.1:9/v1\nmodels = {}\n"
    text = section.format("one", "a") + "key-env = FAR_KEY\n" + section.format("two", "b")
    (tmp_path / "presets.ini").write_text(text)
    monkeypatch.setenv("FAR_KEY", "hush-hush")
    async with serving("--models-preset", str(tmp_path / "presets.ini")) as router:
        async with router.client() as client:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json={**body, "model": "bundled"})
            assert answer.status_code == 200
            refused = await client.post("/v1/chat/completions", json={**body, "model": "a"})
            assert refused.status_code == 503
        own = {router.process.pid}
        for one in all_processes():
            if parent_of(one) in own:
                own.add(one)
        assert len(own) > 1
        for each in own:
            for name in ("cmdline", "environ"):
                assert not [word for word in words(each, name) if "hush-hush" in word], (each, name)
        assert "hush-hush" not in str(router.lines_so_far()) + refused.text
