"""What outlives a request: all caches, and why no client learns from them what another has sent."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import trioserve

ROOT = Path(trioserve.__file__).parent

#: Caches of what clients send, by the owner (a digest of key and salt) that is a part of the key.
BY_OWNER = {
    "engine/cache/ram_cache.py:OrderedDict",  # KV caches in RAM, under their CacheRoot
    "engine/drafts/ngrams.py:OrderedDict",  # texts for drafts, under their CacheRoot
    "engine/encoder.py:OrderedDict",  # embeddings of media, whose id begins with their scope
    "llama/grammar/compiler.py:OrderedDict",  # compiled grammars
    "chat/grammar/answer.py:lru_cache",  # grammars of tools
}
#: Caches of one request, slot or client.
OF_ONE = {
    "llama/grammar/tools.py:OrderedDict",
    "llama/grammar/tools.py:lru_cache",  # what was logged, which answers do not show
    "server/limits/rates.py:OrderedDict",  # the rates of each client
}
#: Of the program, the model, the machine or its files, the same for all clients.
OF_THE_SERVER = {
    "api/base/answers.py:cache",
    "api/edge/access.py:lru_cache",  # names that the server answers to
    "api/edge/connection.py:lru_cache",  # networks of addresses
    "api/base/fields.py:cache",
    "api/base/generation_request.py:cache",
    "api/openapi.py:cache",
    "api/pages.py:cache",
    "chat/markers.py:cache",
    "chat/formats/syntax.py:lru_cache",  # markers of chat formats
    "llama/devices.py:cache",
    "llama/media/library.py:cache",
    "llama/no_logits.py:cache",
    "llama/rpc/library.py:cache",
    "llama/shape.py:lru_cache",  # headers of model files
    "server/context.py:cache",
    "tools/process.py:cache",
}
_PACKAGES = ("api", "chat", "engine", "llama", "media", "server", "tools")


def caches() -> Iterator[str]:
    for package in _PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for made in _makers(node):
                    name = ast.unparse(made).rpartition(".")[2]
                    if name in ("cache", "lru_cache", "OrderedDict"):
                        yield f"{path.relative_to(ROOT).as_posix()}:{name}"


def _makers(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [one for one in node.decorator_list if not isinstance(one, ast.Call)]
    if isinstance(node, ast.keyword):  # of `attrs.field`
        return [node.value] if node.arg == "factory" else []
    return [node.func] if isinstance(node, ast.Call) else []


def test_all_caches_are_listed() -> None:
    assert set(caches()) == BY_OWNER | OF_ONE | OF_THE_SERVER
