"""What a task must be like to run at all."""

from __future__ import annotations

from trioserve.engine.backend import Backend, Projector
from trioserve.errors import (
    ContextLengthExceededError,
    EngineError,
    InvalidMediaError,
    InvalidRequestError,
)
from trioserve.types import Prompt, Task


def check_task(task: Task, backend: Backend) -> None:
    """Refuse a task that can never run on a backend. From any thread.

    Raises:
        InvalidMediaError: the model cannot take one of its media.
        InvalidRequestError: the prompt or a parameter is wrong; `param` names the field.
        ContextLengthExceededError: the prompt leaves no room for an output.
        EngineError: its grammar was not compiled.
    """
    if not task.prompt:
        raise InvalidRequestError("The prompt has no tokens.", param="prompt")
    check_media(task.prompt, backend.projector, backend.n_batch, "prompt")
    if len(task.prompt) >= backend.n_ctx_seq:
        raise ContextLengthExceededError(len(task.prompt), backend.n_ctx_seq)
    task.prompt.check(backend.vocab.n_tokens, "prompt")
    backend.check_sampling(task.params.sampling)
    if task.params.grammar is not None and task.constraint is None:
        raise EngineError("The grammar of the task was not compiled.")
    if task.params.id_slot >= backend.n_slots:
        raise InvalidRequestError(
            f"'id_slot' must be less than {backend.n_slots}.", param="id_slot"
        )
    adapters = task.root.adapters
    if adapters and adapters[-1][0] >= len(backend.adapters):
        raise InvalidRequestError(f"There is no LoRA adapter {adapters[-1][0]}.", param="lora")


def check_media(prompt: Prompt, projector: Projector | None, n_batch: int, param: str) -> None:
    """Refuse media that a model does not take, or not at once. From any thread.

    Raises:
        InvalidMediaError: a chunk is too large.
        InvalidRequestError: the model takes text only. Both name `param`.
    """
    if not prompt.media:
        return
    if projector is None:
        raise InvalidRequestError("The model takes text only.", param=param)
    most = min(n_batch, projector.max_chunk or n_batch)
    for _, chunk in prompt.media:
        if not chunk.is_causal and chunk.n_cells > most:
            raise InvalidMediaError(
                f"The {chunk.kind} takes {chunk.n_cells} tokens, which must be decoded at once;"
                f" {most} is the most of them. --ubatch-size raises that.",
                param=param,
            )
