"""The choice of `auto`, and its line in the log."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import head_models, tiny_models
from tests.support.head_architectures import TWO_HEADS
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.models.auto_drafts import choose


def chosen(model: Path, *spec_type: str, **config: object) -> tuple[tuple[str, ...], str]:
    """Return the types that are chosen for a model, and the name of the head's file."""
    named = Config(model=str(model), spec_type=spec_type or ("auto",), **config)  # type: ignore[arg-type]
    choice = choose(named)
    assert choice is not None
    return choice.config.spec_type, Path(choice.config.spec_draft_model or "").name


def reason(model: Path) -> str:
    choice = choose(Config(model=str(model), spec_type=("auto",)))
    assert choice is not None
    return choice.reason


def test_the_heads_in_the_file_come_first(tmp_path: Path) -> None:
    model = head_models.write_mtp(tmp_path, "glm4moe")
    (tmp_path / "mtp-glm4moe.gguf").write_bytes(model.read_bytes())
    assert chosen(model) == (("ngram-simple", "draft-mtp"), "")
    assert reason(model) == "draft-mtp: the model's own MTP heads"
    assert chosen(model, "auto", "ngram-mod") == (("ngram-mod", "draft-mtp"), "")


def test_a_head_beside_the_model(tmp_path: Path) -> None:
    model, head = head_models.write_apart(tmp_path, "glm4moe")
    assert chosen(model) == (("ngram-simple", "draft-mtp"), "mtp-glm4moe.gguf")
    assert reason(model) == "draft-mtp: the head in mtp-glm4moe.gguf, beside the model"
    assert chosen(model, "draft-mtp") == (("draft-mtp",), "mtp-glm4moe.gguf")
    head.unlink()
    assert chosen(model) == (("ngram-simple",), "")
    assert reason(model) == "ngram-simple: the model has no MTP heads, and no head is beside it"


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_what_a_file_is_for_is_in_its_header(kind: str, tmp_path: Path) -> None:
    if kind == "eagle3":
        model, head = head_models.write_eagle3(tmp_path)
    else:
        model, head = head_models.write_blocks(tmp_path, kind)
    spec_type = f"draft-{kind}"
    assert chosen(model, spec_draft_model=str(head)) == (("ngram-simple", spec_type), head.name)
    beside = head.rename(tmp_path / f"{kind}-{model.stem}-Q8_0.gguf")
    assert chosen(model) == (("ngram-simple", spec_type), beside.name)
    assert chosen(model, spec_type) == ((spec_type,), beside.name)
    assert chosen(model, spec_draft_model=str(model)) == (("ngram-simple",), model.name)


def test_the_head_of_another_model_in_the_folder(tmp_path: Path) -> None:
    model, head = head_models.write_apart(tmp_path, "glm4moe")
    other = shutil.copy(model, tmp_path / "other-Q4_0.gguf")
    assert chosen(model)[1] == head.name
    assert chosen(Path(other))[1] == ""


def test_a_commit_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    commit = tmp_path / "snapshots" / "abc"
    (commit / "Q8_0").mkdir(parents=True)
    model, _ = head_models.write_apart(commit, "glm4moe")
    model = model.rename(commit / "Q8_0" / "other-Q8_0.gguf")
    assert chosen(model)[1] == "mtp-glm4moe.gguf"


def test_what_cannot_be_used_is_not_chosen(tmp_path: Path) -> None:
    two = tiny_models.write(tmp_path / "two.gguf", TWO_HEADS)
    assert "has 2 MTP heads, more than llama.cpp computes" in reason(two)
    (tmp_path / "a").mkdir()
    gemma, _ = head_models.write_assistant(tmp_path / "a")
    assert "with --swa-full" in reason(gemma)
    assert chosen(gemma, swa_full=True)[1] == "mtp-gemma4.gguf"
    phi3 = tiny_models.write_generating(tmp_path / "a", "phi3")
    (tmp_path / "a" / "mtp-phi3.gguf").write_bytes(b"GGUF and no more")
    assert reason(phi3) == "ngram-simple: mtp-phi3.gguf is no head"
    assert chosen(phi3) == (("ngram-simple",), "")
    assert chosen(tmp_path / "missing.gguf") == (("ngram-simple",), "")


def test_a_type_of_heads_that_is_named_needs_one(tmp_path: Path) -> None:
    model = head_models.write_read(tmp_path)
    with pytest.raises(ModelLoadError, match=r"'draft-eagle3' needs a head: .* eagle3-\*.gguf"):
        choose(Config(model=str(model), spec_type=("draft-eagle3",)))
    for spec_type in ("none", "ngram-mod", "draft-mtp"):
        assert choose(Config(model=str(model), spec_type=(spec_type,))) is None


def test_embeddings_have_no_drafts(tmp_path: Path) -> None:
    config = Config(model="x.gguf", spec_type=("auto",), embeddings=True)
    choice = choose(config)
    assert choice is not None
    assert choice.config.spec_type == ("none",)
