"""Loading heads: the models that they fit, and what the errors say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from structlog.testing import capture_logs

from tests.support import head_models, tiny_models
from tests.support.drafted import Settings, without_head, write_head
from tests.support.head_architectures import DFLASH, EAGLE3, MTP, TWO_HEADS, heads_of
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import BackendMismatchError, ConfigError, ModelLoadError
from trioserve.llama import staged
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.estimate import measure
from trioserve.llama.heads import HeadDrafter
from trioserve.llama.library import lib
from trioserve.models import head_families
from trioserve.server.lifecycle.engine import ngram_drafters


def load(**config: Any) -> LlamaBackend:
    backend = llama.load(Config(**{"threads": 1, "ctx_size": 512, "parallel": 2, **config}))
    assert isinstance(backend, LlamaBackend)
    return backend


def refusal(model: Path, spec_type: str, draft: Path | None = None, **config: Any) -> str:
    """Load a model with a head that it cannot have; returns the error."""
    if draft is not None:
        config["spec_draft_model"] = str(draft)
    with pytest.raises(ModelLoadError) as caught:
        load(model=str(model), spec_type=(spec_type,), **config)
    assert caught.value.message.endswith(".")
    return caught.value.message


@pytest.mark.parametrize("kind", ["glm4moe", "eagle3", "dflash"])
def test_a_head_of_its_model(tmp_path: Path, kind: str) -> None:
    settings: Settings = write_head(tmp_path, kind, is_good=False)
    with load(**settings) as backend:
        (drafter,) = backend.drafters
        assert isinstance(drafter, HeadDrafter)
        assert (drafter.name, drafter.is_free) == (settings["spec_type"][0], False)
        assert drafter.n_max == (7 if kind == "dflash" else 16)
        assert backend.n_outputs == 3 + 64


def test_a_model_without_mtp_heads(tmp_path: Path) -> None:
    path = tiny_models.write_generating(tmp_path, "llama")
    assert "needs a file with MTP heads" in refusal(path, "draft-mtp")


def test_a_file_that_has_lost_its_mtp_heads(tmp_path: Path) -> None:
    def lose(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.startswith("blk.4.")]:
            del weights[name]

    path = tiny_models.write(tmp_path / "lost.gguf", MTP["glm4moe"], change=lose)
    assert "needs a file with MTP heads" in refusal(path, "draft-mtp")


def test_mtp_heads_that_are_not_supported(tmp_path: Path) -> None:
    two = tiny_models.write(tmp_path / "two.gguf", TWO_HEADS)
    assert "it has 2, and llama.cpp computes 1 of the architecture glm4moe" in refusal(
        two, "draft-mtp"
    )


def test_the_heads_of_a_file_are_not_used_without_need(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "mtp.gguf", MTP["glm4moe"])
    with load(model=str(path)) as backend:
        assert not backend.drafters


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    model, head = head_models.write_eagle3(tmp_path)
    assert "it is of the kind llama, and not eagle3" in refusal(model, "draft-eagle3", model)
    assert "it is of the kind eagle3, and not dflash" in refusal(model, "draft-dflash", head)
    message = refusal(model, "none", head)
    assert message.endswith("set spec_type to 'draft-eagle3'.")
    assert "only makes drafts for another model" in refusal(head, "none")
    _, heads = head_models.write_apart(tmp_path, "glm4moe")
    assert refusal(heads, "none").endswith("set spec_type to 'draft-mtp'.")


@pytest.mark.parametrize("kind", ["glm4moe", "gemma4", "eagle3", "dspark"])
def test_an_estimate_counts_the_head(kind: str, tmp_path: Path) -> None:
    settings = write_head(tmp_path, kind, is_good=False, is_apart=True)
    alone, drafted = measure(Config(**without_head(settings))), measure(Config(**settings))
    head = Path(settings["spec_draft_model"])
    assert drafted.weights == alone.weights + head.stat().st_size
    assert (drafted.cache > alone.cache) == (kind != "gemma4")  # an assistant has no cache


def test_a_model_whose_layers_cannot_be_read(tmp_path: Path) -> None:
    _, head = head_models.write_eagle3(tmp_path)
    phi3 = tiny_models.write_generating(tmp_path, "phi3")
    assert "is not there for the architecture phi3: llama.cpp does not give out" in refusal(
        phi3, "draft-eagle3", head
    )
    gemma = tiny_models.write_generating(tmp_path, "gemma3")
    assert "not there for the architecture gemma3" in refusal(gemma, "draft-eagle3", head)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"target_layers": [1, 2, 4]}, "it reads the layers [1, 2, 4], but the model has 4"),
        ({"target_hidden_size": 64}, "it is for models of the width 64, and not 32"),
    ],
)
def test_a_head_of_another_model(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:

    model, _ = head_models.write_eagle3(tmp_path)
    shapes = dict(EAGLE3.tensors)
    width = metadata.get("target_hidden_size", 32)
    shapes["fc.weight"] = (32, 3 * width)
    other = attrs.evolve(EAGLE3, metadata={**EAGLE3.metadata, **metadata}, tensors=shapes)
    head = tiny_models.write(tmp_path / "other.gguf", other)
    assert words in refusal(model, "draft-eagle3", head)


def test_a_dflash_model_without_a_mask_token(tmp_path: Path) -> None:

    model = head_models.write_read(tmp_path)
    head = head_models.write_block(tmp_path, DFLASH, mask=None)
    assert "no mask token" in refusal(model, "draft-dflash", head)


@pytest.mark.parametrize(
    ("arch", "spec_type", "words"),
    [
        ("exaone-moe", "draft-mtp", "llama.cpp keeps them in the file, but does not compute them"),
        ("phi3", "draft-mtp", "llama.cpp does not compute MTP heads for it"),
        ("phi3", "draft-dspark", "llama.cpp does not give out what goes into its layers"),
        ("qwen4exp", "draft-eagle3", "no such model has been tried; a later trioserve may have it"),
    ],
)
def test_why_an_architecture_has_no_heads(arch: str, spec_type: str, words: str) -> None:
    assert head_families.refusal(arch, spec_type).startswith(
        f"{spec_type} is not there for the architecture {arch}: {words}"
    )


# -- what is chosen


def test_a_head_that_is_chosen_is_used(tmp_path: Path) -> None:
    head_models.write_apart(tmp_path, "glm4moe")
    with load(model=str(tmp_path / "glm4moe.gguf"), spec_type=("auto",)) as backend:
        assert [drafter.name for drafter in backend.drafters] == ["draft-mtp"]
        assert backend.n_outputs == 2 + 64


def lose_tensor(path: Path) -> None:
    """Leave a tensor out of a head, which ends the process of llama.cpp."""
    change = lambda weights: weights.pop("blk.4.nextn.enorm.weight")  # noqa: E731
    tiny_models.write(path, heads_of(MTP["glm4moe"]), change=change)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def of_another_width(path: Path) -> None:
    metadata = {**MTP["glm4moe"].metadata, "embedding_length": 16}
    tiny_models.write(path, attrs.evolve(heads_of(MTP["glm4moe"]), metadata=metadata))


@pytest.mark.parametrize("damage", [lose_tensor, cut_short, of_another_width])
def test_a_broken_head_beside_the_model_costs_only_its_drafts(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    model, head = head_models.write_apart(tmp_path, "glm4moe")
    damage(head)
    with capture_logs() as logs, load(model=str(model), spec_type=("auto",)) as backend:
        assert not backend.drafters
    chosen, refused = (line for line in logs if line["event"].startswith("drafts: "))
    assert chosen["event"] == f"drafts: draft-mtp: the head in {head.name}, beside the model"
    assert refused["event"] == "drafts: the head is not used"
    assert head.name in refused["reason"]
    message = refusal(model, "draft-mtp", head)  # named, it is an error
    assert head.name in message


# -- a library without the functions


def test_a_library_that_lacks_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    known = lib._lib

    class Older:
        def __getattr__(self, name: str) -> Any:
            if "llama_get_embeddings_layer_inp" in name:
                raise AttributeError(name)
            return getattr(known, name)

        _handle = known._handle

    monkeypatch.setattr(lib, "_lib", Older())
    with pytest.raises(BackendMismatchError) as caught:
        staged.staged("draft-eagle3")
    assert caught.value.message == (
        "spec_type 'draft-eagle3' needs a llama.cpp with llama_get_embeddings_layer_inp, which the "
        "installed one lacks."
    )


def test_bindings_without_a_second_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib, "llama_context_default_params", SimpleNamespace)
    with pytest.raises(BackendMismatchError, match="ctx_other"):
        staged.staged("draft-mtp")


# -- settings


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"spec_type": ("draft-simple",)}, "'draft-simple' needs spec_draft_model"),
        ({"spec_type": ("auto", "draft-mtp")}, "'auto' chooses a head"),
        ({"spec_type": ("draft-mtp", "draft-eagle3")}, "may have one of draft-simple, draft-mtp"),
        ({"spec_type": ("draft-mtp",), "spec_draft_ngl": 3}, "spec_draft_ngl has no effect"),
        ({"spec_type": ("draft-mtp",), "embeddings": True}, "no effect on embeddings"),
    ],
)
def test_settings_that_do_not_go_together(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config(**config)


def test_the_order_of_drafters() -> None:
    config = Config(spec_type=("draft-mtp", "ngram-simple"), spec_draft_n_max=3)
    assert config.draft_types == ("ngram-simple", "draft-mtp")
    chosen = [Config(spec_type=("auto", *more)) for more in ((), ("ngram-mod",))]
    assert [one.name for config in chosen for one in ngram_drafters(config)] == [
        "ngram-simple",
        "ngram-mod",
    ]
    assert config.head_type == "draft-mtp"
