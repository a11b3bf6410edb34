"""llama-server's own routes, and the routes about the server itself: health, slots, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.api.base.vendors import PromptFields, Vendor
from trioserve.api.llama import adapters, admin, completion, rerank, slots


def _list_of(name: str) -> Mapping[str, Any]:
    """List a model that has only a name, for the clients of all APIs."""
    from trioserve.api.router.proxy import description

    described = {**description(name), "name": name, "model": name}
    return {"data": [described], "models": [described]}


VENDOR = Vendor(
    routes=(adapters.blueprint, completion.blueprint, rerank.blueprint, slots.blueprint),
    routes_of_server=(admin.blueprint,),
    prompts={
        "/completion": PromptFields(turns=("prompt",)),
        "/completions": PromptFields(turns=("prompt",)),
        "/infill": PromptFields(turns=("input_extra", "input_prefix")),
    },
    lists={"/models": _list_of, "/v1/models": _list_of},
    answer_rules=("/v1/chat/completions/control",),
)
