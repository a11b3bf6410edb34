"""References to models on the hub, and the files that they name."""

from __future__ import annotations

import pytest

from trioserve.errors import HubNotFoundError, InvalidRequestError, UnknownQuantError
from trioserve.models.gguf import GgufName
from trioserve.models.hub import HubReference
from trioserve.models.hub.reference import (
    choose,
    head_beside,
    is_repo,
    models_in,
    projector_beside,
)


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


FILES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-model-f16.gguf",
    "model-BF16-00001-of-00002.gguf",
    "model-BF16-00002-of-00002.gguf",
    "model-Q8_0.gguf",
    "model-q4_k_m.gguf",
    "mtp-model-Q4_K_M.gguf",
    "sub/model-IQ2_XS.gguf",
]


def chosen(files: list[str], quant: str | None = None, file: str | None = None) -> tuple[str, ...]:
    return choose(files, HubReference("user/repo", quant, file))


@pytest.mark.parametrize(
    ("quant", "path"),
    [
        (None, "model-q4_k_m.gguf"),
        ("Q4_K_M", "model-q4_k_m.gguf"),
        ("q8_0", "model-Q8_0.gguf"),
        ("iq2_xs", "sub/model-IQ2_XS.gguf"),
    ],
)
def test_a_model_by_its_quantization(quant: str | None, path: str) -> None:
    assert chosen(FILES, quant) == (path,)


def test_all_parts_of_a_model_that_is_split() -> None:
    assert chosen(FILES, "bf16") == tuple(FILES[3:5])
    assert chosen(FILES, file=FILES[3]) == tuple(FILES[3:5])


def test_without_a_quantization_the_second_choice_and_the_first_file() -> None:
    assert chosen(["a-F16.gguf", "a-Q8_0.gguf"]) == ("a-Q8_0.gguf",)
    assert chosen(["a-Q5_0.gguf", "a-F16.gguf"]) == ("a-Q5_0.gguf",)
    assert chosen(["mmproj-Q4_K_M.gguf", "a.gguf"]) == ("a.gguf",)


def test_a_quantization_is_a_whole_word_at_its_end() -> None:
    assert chosen(["a-Q4_K_M_L.gguf", "a-Q8_0.gguf"]) == ("a-Q8_0.gguf",)
    assert chosen(["a-UD-Q4_K_XL.gguf"], "Q4_K_XL") == ("a-UD-Q4_K_XL.gguf",)


def test_a_file_by_its_name() -> None:
    assert chosen(FILES, "Q8_0", file="sub/model-IQ2_XS.gguf") == ("sub/model-IQ2_XS.gguf",)
    for name in ("other.gguf", "README.md"):
        with pytest.raises(HubNotFoundError, match=f"user/repo has no GGUF file '{name}'"):
            chosen(FILES, file=name)


def test_an_unknown_quantization_is_told_what_there_is() -> None:
    with pytest.raises(UnknownQuantError) as caught:
        chosen(FILES, "Q2_K")
    assert caught.value.message == (
        "user/repo has no model with the quantization Q2_K; it has BF16, Q8_0, Q4_K_M, IQ2_XS."
    )


def test_characters_of_patterns_mean_themselves() -> None:
    with pytest.raises(UnknownQuantError):
        chosen(FILES, "Q._0")


def test_a_repository_without_models() -> None:
    with pytest.raises(HubNotFoundError, match="user/repo has no GGUF files that are models"):
        chosen(["README.md", "model.safetensors", "mmproj-F16.gguf"])


def test_a_repository_of_presets() -> None:
    with pytest.raises(HubNotFoundError, match=r"no model but presets: download its preset\.ini"):
        chosen(["README.md", "preset.ini"])


def test_a_model_that_lacks_a_part() -> None:
    with pytest.raises(HubNotFoundError, match="lacks a part of the model: model-BF16-00002-of"):
        chosen([FILES[3]])


def test_what_names_say() -> None:
    name = GgufName.read("sub/model-IQ2_XS-00003-of-00012.gguf")
    assert name == GgufName("sub/model-IQ2_XS", 3, 12)
    assert (name.quant, name.bits, name.is_model) == ("IQ2_XS", 2, False)
    assert GgufName.read("model.bin") is None
    plain = GgufName.read("model.gguf")
    assert plain is not None and (plain.quant, plain.bits) == (None, 0)
    long = GgufName.read(f"model-Q{'9' * 5000}.gguf")
    assert long is not None and long.bits == 0
    assert list(models_in(FILES)) == [FILES[3], FILES[5], FILES[6], FILES[8]]


def test_the_projector_that_belongs_to_a_model() -> None:
    files = ["mmproj-BF16.gguf", "mmproj-Q8_0.gguf", "a/mmproj-F32.gguf", "b/mmproj-Q8_0.gguf"]
    assert projector_beside(files, "model-Q8_0.gguf") == "mmproj-Q8_0.gguf"
    assert projector_beside(files, "model-F16.gguf") == "mmproj-BF16.gguf"
    assert projector_beside(files, "a/model-Q8_0.gguf") == "a/mmproj-F32.gguf"
    assert projector_beside(files, "c/d/model-Q8_0.gguf") == "mmproj-Q8_0.gguf"
    assert projector_beside(["ab/mmproj-F16.gguf"], "a/model.gguf") is None
    assert projector_beside(["model.gguf"], "model.gguf") is None


def test_the_head_that_is_beside_a_model() -> None:
    files = ["mtp-m-Q8_0.gguf", "mtp-m-Q4_0.gguf", "a/eagle3-m.gguf", "dflash-x/m-Q8_0.gguf"]
    assert head_beside(files, "m-Q4_K_M.gguf") == ("mtp-m-Q4_0.gguf",)
    assert head_beside(files, "a/m-Q8_0.gguf") == ("mtp-m-Q8_0.gguf",)
    assert head_beside(files, "a/m-Q8_0.gguf", ["draft-eagle3"]) == ("a/eagle3-m.gguf",)
    assert head_beside(files, "m-Q8_0.gguf", ["draft-eagle3", "draft-dflash"]) == ()
    parts = [f"mtp-m-F16-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert head_beside(parts, "m-F16.gguf") == tuple(parts)
    assert head_beside(parts[1:], "m-F16.gguf") == ()


def test_a_repository_of_heads() -> None:
    files = ["eagle3-m-F16.gguf", "eagle3-m-Q8_0.gguf", "other-Q4_K_M.gguf"]
    heads = ("draft-eagle3",)
    assert choose(files, HubReference("user/repo", heads=heads)) == ("eagle3-m-Q8_0.gguf",)
    assert choose(files, HubReference("user/repo", "F16", heads=heads)) == ("eagle3-m-F16.gguf",)
    assert choose(files, HubReference("user/repo", heads=("draft-mtp",))) == ("other-Q4_K_M.gguf",)
