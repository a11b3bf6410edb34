"""Sampling inside the decode, on the device that computes the logits.

They are not copied to the CPU then: on a GPU with many slots that is most of what sampling costs.
"""

from __future__ import annotations

from typing import Any

import structlog

from trioserve.llama.context import Context
from trioserve.llama.library import lib

_log = structlog.get_logger("llama")


class Offload:
    """Gives llama.cpp the chains that it is to run within `llama_decode`, one for a sequence.

    A chain is prepared for that once. After it, it is of use to no one but its sequence; a copy
    goes on from its state. Used from the inference thread.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: set[str] = set()

    def start(self, chain: Any, seq: int) -> Any:
        """Have a chain that is new, or a copy, sample for a sequence.

        Returns None, or, where a sampler of the chain cannot run on the device, a copy of the
        chain to be used on the CPU.
        """
        accepted = lib.llama_set_sampler(self._context.handle, seq, chain)
        names = names_of(chain)
        here = [name for name in names if not name.startswith(("+", "?"))]
        if accepted and not here:
            return None
        # Those after one that runs on the CPU do so, too.
        reason = here[0].lstrip("-") if here else "the model is split by tensors"
        if reason not in self._told:
            self._told.add(reason)
            _log.info("a request is sampled on the CPU, not on the device", reason=reason)
        return self.stop(chain, seq)

    def stop(self, chain: Any, seq: int) -> Any:
        """Take a sequence's chain away; returns a copy of it, and frees it."""
        lib.llama_set_sampler(self._context.handle, seq, None)
        copy = lib.llama_sampler_clone(chain)
        lib.llama_sampler_free(chain)
        return copy


def names_of(chain: Any) -> tuple[str, ...]:
    """Return the names of a chain's samplers, in order.

    A ``?`` before a name means "without effect". In a chain that was prepared for a device, ``+``
    means "on the device", and ``-`` "on the CPU".
    """
    count = lib.llama_sampler_chain_n(chain)
    each = (lib.llama_sampler_chain_get(chain, i) for i in range(count))
    return tuple(lib.llama_sampler_name(sampler).decode() for sampler in each)
