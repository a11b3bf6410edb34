"""Ollama's client, a router in a process of its own, and a hub: pull, use, delete."""

from __future__ import annotations

from pathlib import Path

import ollama
import pytest

from tests.hub.server import Hub
from tests.support.command import serving
from tests.support.ollama_api import with_client
from trioserve.models import BUNDLED
from trioserve.models.hub import cached_models

pytestmark = pytest.mark.system

NAME = "user/repo:Q8_0"
HI = [{"role": "user", "content": "Count from 1 to 3"}]


async def test_a_model_is_pulled_used_and_deleted(hub: Hub, tmp_path: Path) -> None:
    hub.add("user/repo", {"m-Q8_0.gguf": BUNDLED.read_bytes()})
    models = tmp_path / "models"
    models.mkdir()

    def names(client: ollama.Client) -> list[str | None]:
        return [each.model for each in client.list().models]

    def use(client: ollama.Client) -> None:
        assert client.chat(NAME, HI).model == "bundled"  # the only one answers
        with pytest.raises(ollama.ResponseError, match="user/none") as caught:
            list(client.pull("user/none", stream=True))
        assert caught.value.status_code == 404
        first, *progress, last = client.pull("hf.co/user/repo", stream=True)
        assert (first.status, last.status) == ("pulling manifest", "success")
        assert progress[-1].completed == progress[-1].total == BUNDLED.stat().st_size
        assert client.pull(NAME).status == "success"  # what is here is brought up to date
        assert names(client) == [NAME, "bundled"]
        answer = client.chat("user/repo", HI, options={"num_predict": 5})
        assert (answer.model, answer.eval_count) == (NAME, 5)
        assert [each.model for each in client.ps().models] == [NAME, "bundled"]
        assert client.delete(NAME).status == "success"
        assert names(client) == ["bundled"]
        assert [each.model for each in client.ps().models] == ["bundled"]

    async with serving("--models-dir", str(models)) as running:
        await with_client(running.url, use)
    assert cached_models() == []
    assert len(hub.downloads()) == 1
