"""The cache is shared with huggingface_hub: each finds what the other has downloaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.hub.server import Hub
from trioserve.cli.main import main
from trioserve.models.hub import HubReference, cached_models, find

pytestmark = pytest.mark.system

REPO, FILE = "user/repo", "m-Q8_0.gguf"
MODEL = b"eight" * 500

DOWNLOAD = f"from huggingface_hub import hf_hub_download as get; print(get('{REPO}', '{FILE}'))"


def huggingface_hub(**environ: str) -> str:
    """Download the file with huggingface_hub; returns the path that it gives."""
    found = subprocess.run(
        [sys.executable, "-c", DOWNLOAD],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"HF_HUB_DISABLE_XET": "1"} | environ,
    )
    return found.stdout.strip()


@pytest.fixture(autouse=True)
def _full_hub(hub: Hub) -> None:
    hub.add(REPO, {FILE: MODEL, "config.json": b"{}"})


def test_it_finds_what_we_have_downloaded(hub: Hub) -> None:
    assert main(["pull", REPO]) == 0
    path = huggingface_hub(HF_HUB_OFFLINE="1")
    assert path == str(cached_models()[0].files[0])
    assert huggingface_hub() == path
    assert len(hub.downloads()) == 1


def test_we_find_what_it_has_downloaded(hub: Hub) -> None:
    path = huggingface_hub()
    model = find(HubReference(REPO))
    assert model is not None
    assert (model.name, str(model.files[0])) == (f"{REPO}:Q8_0", path)
    assert main(["pull", REPO]) == 0
    assert len(hub.downloads()) == 1
