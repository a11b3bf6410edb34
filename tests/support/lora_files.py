"""Makes LoRA adapters with random weights, for the bundled model or another."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from trioserve.models import BUNDLED


def make_lora(
    path: Path,
    *,
    seed: int = 0,
    strength: float = 0.5,
    task_name: str = "",
    invocation: tuple[int, ...] = (),
    arch: str = "llama",
    model: Path = BUNDLED,
) -> Path:
    """Write an adapter of rank 4 for the query and output weights of each layer of a model."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    if task_name:
        writer.add_string("adapter.lora.task_name", task_name)
        writer.add_string("adapter.lora.prompt_prefix", f"{task_name}: ")
    if invocation:
        writer.add_array("adapter.alora.invocation_tokens", list(invocation))
    for tensor in gguf.GGUFReader(model).tensors:
        if tensor.name.endswith(("attn_q.weight", "attn_output.weight")):
            n_in, n_out = map(int, tensor.shape)
            for name, shape in (("lora_a", (4, n_in)), ("lora_b", (n_out, 4))):
                values = random.normal(0, strength / 2, shape).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
