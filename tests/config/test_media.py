"""Flags for images, sound and video."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.config.parse import parse


def test_the_flags_of_a_projector() -> None:
    config = read("-mm", "p.gguf", "--no-mmproj-offload", "-mmdev", "none")
    assert (config.mmproj, config.mmproj_offload, config.mmproj_device) == ("p.gguf", False, "none")
    assert Config().mmproj_auto
    assert not read("--no-mmproj").mmproj_auto
    assert read(LLAMA_ARG_MMPROJ="p.gguf", LLAMA_ARG_NO_MMPROJ_AUTO="1") == Config(
        mmproj="p.gguf", mmproj_auto=False
    )
    assert read(MTMD_BACKEND_DEVICE="CUDA0").mmproj_device == "CUDA0"


def test_what_requests_may_send(tmp_path: Path) -> None:
    config = read("--media-path", str(tmp_path), "--media-urls", "a.example, .b.example")
    assert config.media_path == str(tmp_path)
    assert config.media_urls == ("a.example", ".b.example")
    assert Config().media_path is None
    assert Config().media_urls == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--media-path", "/no/such/place"),
            "--media-path is '/no/such/place', which is not a",
        ),
        (
            ("--image-min-tokens", "9", "--image-max-tokens", "4"),
            "--image-min-tokens must be at most",
        ),
        (("--mmproj", "p.gguf", "--reranking"), "--mmproj has no effect on reranking"),
        (("--media-max-bytes", "0"), "--media-max-bytes must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(flags: tuple[str, ...], message: str) -> None:
    assert message in refused(*flags)


@pytest.mark.parametrize("flag", ["--mtmd-batch-max-tokens", "--video-ffmpeg-dir"])
def test_what_is_not_needed_is_noted(flag: str) -> None:
    (note,) = parse([flag, "1"], {}).notes
    assert note.startswith(f"{flag} has no effect: ")
