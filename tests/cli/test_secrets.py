"""Secrets of the command line, as other processes see them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

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
