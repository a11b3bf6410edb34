"""`PromptLog`: the prompts of all requests as files, for finding mistakes in templates."""

from __future__ import annotations

import time
from pathlib import Path

import structlog
import trio

from trioserve.engine.backend import Vocab
from trioserve.errors import ConfigError
from trioserve.types import Prompt

_log = structlog.stdlib.get_logger("trioserve")


def text_of(vocab: Vocab, prompt: Prompt) -> bytes:
    """Write a prompt as text, with ``[image]``, ``[audio]`` or ``[video]`` for each chunk."""
    written, n_tokens = b"", 0
    for n_before, chunk in prompt.media:
        written += vocab.detokenize(prompt.tokens[n_tokens:n_before])
        written += f"[{chunk.kind}]".encode()
        n_tokens = n_before
    return written + vocab.detokenize(prompt.tokens[n_tokens:])


class PromptLog:
    """Writes each prompt to a file of its own, named by the time and the number of the request.

    Args:
        directory: where to; it is made if it is not there.
        vocab: turns tokens into text.

    Raises:
        ConfigError: the directory cannot be made.
    """

    def __init__(self, directory: str, vocab: Vocab) -> None:
        self._directory, self._vocab = Path(directory), vocab
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"log_prompts_dir: {directory} cannot be made: {error.strerror}"
            ) from error

    async def write(self, task_id: int, prompt: Prompt) -> None:
        """Write a prompt. When that fails, the log says so, and the request goes on."""
        path = self._directory / f"{time.time_ns() // 1_000_000:012}-{task_id}.txt"

        def write_file() -> None:
            path.write_bytes(text_of(self._vocab, prompt))

        try:
            await trio.to_thread.run_sync(write_file)
        except OSError as error:
            _log.error("a prompt could not be written", file=str(path), error=error.strerror)
