"""Why a path has no route: it is of an API that is served in part, or mistyped."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from trioserve.errors import NotFoundError

#: Paths that the original APIs have and this server lacks, each with the reason or a replacement.
_UNSERVED = {
    "OpenAI": {
        "/v1/images/": "no model here makes images; chats may contain them",
        "/v1/videos/": "no model here makes videos; chats may contain them",
        "/v1/audio/speech/": "no model here speaks; /v1/audio/transcriptions listens",
        "/v1/moderations/": "ask a model in a chat",
        "/v1/fine_tuning/": "models are served here, and not trained",
        "/v1/assistants/": "/v1/responses takes its place",
        "/v1/threads/": "/v1/conversations takes its place",
        "/v1/vector_stores/": "/v1/embeddings makes vectors, which the client keeps",
        "/v1/uploads/": "/v1/files takes a file in one part",
        "/v1/realtime/": "streams are server-sent events, as of /v1/chat/completions",
        "/v1/containers/": "--tools runs code in a folder of this machine",
        "/v1/evals/": "a client can evaluate with /v1/batches",
        "/v1/organization/": "--api-key-file has the keys, and /v1/usage what they use",
    },
    "Anthropic": {
        "/v1/complete/": "/v1/messages takes its place",
        "/v1/organizations/": "--api-key-file has the keys, and /v1/usage what they use",
        "/v1/skills/": "skills belong to the client",
    },
    "Ollama": {
        "/api/create/": "a section of --models-preset takes the place of a Modelfile",
        "/api/copy/": "--alias, or a section of --models-preset, gives a model another name",
        "/api/push/": "models are downloaded here, and not published",
        "/api/blobs/": "put GGUF files into --models-dir",
    },
    "Cohere": {"/v2/chat/": "/v1/chat/completions takes its place"},
    "Google": {"/v1beta/": "/v1/chat/completions takes its place"},
}

#: Characters of a path that are looked at, and how alike two paths are that a slip tells apart.
_LONGEST, _ALIKE = 100, 0.8


def not_found(path: str, known: Iterable[str]) -> NotFoundError:
    """Make the error of a path that has no route; `known` are the rules of those that have."""
    if len(path) > _LONGEST:
        return NotFoundError(f"There is no {path[:_LONGEST]}… here.")
    for owner, paths in _UNSERVED.items():
        for start, why in paths.items():
            if f"{path}/".startswith((start, start.removeprefix("/v1"))):
                return NotFoundError(f"{owner}'s {path} is not served: {why}.")
    near = get_close_matches(path, {one for one in known if "<" not in one}, 1, _ALIKE)
    end = f"; did you mean {near[0]}?" if near else "."
    return NotFoundError(f"There is no {path.strip() or 'such path'} here{end}")
