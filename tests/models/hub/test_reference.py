"""How models on the hub are named."""

from __future__ import annotations

import pytest

from trioserve.errors import InvalidRequestError
from trioserve.models.hub import HubReference
from trioserve.models.hub.reference import is_repo


@pytest.mark.parametrize(
    ("text", "repo", "quant"),
    [
        ("ggml-org/gemma-3-4b-it-GGUF", "ggml-org/gemma-3-4b-it-GGUF", None),
        ("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "ggml-org/gemma-3-4b-it-GGUF", "Q4_K_M"),
        ("user/repo:UD-Q4_K_XL", "user/repo", "UD-Q4_K_XL"),
        ("user/repo:latest", "user/repo", None),
        ("hf.co/user/repo:q8_0", "user/repo", "q8_0"),
        ("huggingface.co/user/repo", "user/repo", None),
        ("https://huggingface.co/user/repo", "user/repo", None),
        ("hf.co/user", "hf.co/user", None),
        ("_a/b.c_d-e.f", "_a/b.c_d-e.f", None),
    ],
)
def test_a_reference(text: str, repo: str, quant: str | None) -> None:
    assert HubReference.parse(text) == HubReference(repo, quant)


@pytest.mark.parametrize(
    "text",
    [
        "", "repo", "a/b/c", "/b", "a/", "a/b:", "a/b:c:d", "a/../b", "../b", "a/b..c", "a/-b",
        "a b/c", "é/b", "a/b\n", "C:/model", "a" * 200 + "/" + "b" * 200,
    ],
)  # fmt: skip
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a model on the hub") as caught:
        HubReference.parse(text)
    assert caught.value.param == "model"


def test_a_reference_reads_as_it_is_written() -> None:
    for text in ("user/repo", "user/repo:Q8_0"):
        assert str(HubReference.parse(text)) == text
    assert str(HubReference.parse("user/repo", file="x/y.gguf")) == "user/repo/x/y.gguf"


def test_names_of_repositories() -> None:
    assert is_repo("user/repo")
    assert not any(map(is_repo, ("user", "user/repo/x", "user/repo:Q8_0", "datasets")))
