"""The routes that vLLM adds to OpenAI's API: scores and classes of texts, and the tokenizer."""

from __future__ import annotations

from trioserve.api.base.vendors import Vendor
from trioserve.api.vllm import routes

VENDOR = Vendor(name="vllm", routes=(routes.routes,))
